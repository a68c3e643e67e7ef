# Environment of an SGLang server on a CPU; source it, or set the same in ServerProcess(env=...).
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH="$here/shims${PYTHONPATH:+:$PYTHONPATH}"
