"""What the capture counts, for /hslake/status and the metrics (`hook` in schemas/status.json)."""

from dataclasses import dataclass


@dataclass
class Figures:
    """Counts and seconds since this writer began."""

    gpu_bytes: int = 0  # of GPU memory that the capture may take
    gpu_retries: int = 0  # of allocations in this process for which kept memory was freed first
    forwards: int = 0  # with rows of the lake's samples
    forward_s: float = 0.0  # that forwards spent in the hook, waits included
    wait_s: float = 0.0  # that forwards were held up, by staging without room or earlier copies
    wait_max_s: float = 0.0
    copies: int = 0  # forwards whose rows have arrived in staging
    copy_s: float = 0.0  # from the end of a forward's launch to the arrival of its rows
    copy_max_s: float = 0.0

    def waited(self, seconds: float) -> None:
        """A forward was held up for so long in all."""
        self.wait_s += seconds
        self.wait_max_s = max(self.wait_max_s, seconds)

    def copied(self, seconds: float) -> None:
        """A forward's rows have arrived."""
        self.copies += 1
        self.copy_s += seconds
        self.copy_max_s = max(self.copy_max_s, seconds)

    def rows(self, in_flight: int) -> dict[str, float]:
        """The figures by the schema's names; `in_flight` forwards are being copied now."""
        return {
            "forwards": self.forwards,
            "forward_s": round(self.forward_s, 6),
            "in_flight": in_flight,
            "wait_s": round(self.wait_s, 6),
            "wait_max_s": round(self.wait_max_s, 6),
            "copies": self.copies,
            "copy_s": round(self.copy_s, 6),
            "copy_max_s": round(self.copy_max_s, 6),
            "gpu_bytes": self.gpu_bytes,
            "gpu_retries": self.gpu_retries,
        }
