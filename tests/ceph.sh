#!/bin/bash
# A real S3 server for tests: one-node Ceph RADOS Gateway in RAM, ready in about 25 s.
# needs (Debian): ceph-mon ceph-osd ceph-mgr radosgw ceph-common, which `.ci/run` installs as root
# usage: ceph.sh up DIR GB PORT MON1 MON2 -> http://127.0.0.1:PORT, key tkey, secret tsecret
#        ceph.sh down DIR
set -eu
D=$(realpath -m "$2"); C=$D/ceph.conf
if [ "$1" = down ]; then for f in "$D"/run/*.pid; do [ -e "$f" ] && kill "$(cat "$f")" 2>/dev/null || true; done; exit 0; fi
GB=$3 PORT=$4 MON1=$5 MON2=$6; mkdir -p "$D"/{mon.a,mgr.x,osd.0,run,log,rgw}
ID=$(cat /proc/sys/kernel/random/uuid)
cat > "$C" <<EOF
[global]
fsid = $ID
mon host = v2:127.0.0.1:$MON1/0,v1:127.0.0.1:$MON2/0
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $D/keyring
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
osd objectstore = memstore
memstore device bytes = $((GB << 30))
run dir = $D/run
pid file = $D/run/\$name.pid
admin socket = $D/run/\$name.asok
log file = $D/log/\$name.log
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
mon data = $D/mon.a
mon data avail warn = 5
mon data avail crit = 1
osd data = $D/osd.0
mgr data = $D/mgr.x
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:$PORT tcp_nodelay=1
rgw data = $D/rgw
EOF
key() { ceph-authtool "$D/keyring" --gen-key -n "$1" "${@:2}" >/dev/null; }
ceph-authtool -C "$D/keyring" >/dev/null
key mon. --cap mon 'allow *'
key client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
key osd.0 --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
key mgr.x --cap mon 'allow *' --cap osd 'allow *' --cap mds 'allow *'
key client.rgw.a --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
monmaptool --create --addv a "[v2:127.0.0.1:$MON1,v1:127.0.0.1:$MON2]" --fsid "$ID" "$D/monmap" >/dev/null
ceph-mon -c "$C" --mkfs -i a --monmap "$D/monmap" --keyring "$D/keyring"
ceph-mon -c "$C" -i a
sleep 1
ceph -c "$C" auth import -i "$D/keyring" 2>/dev/null
ceph -c "$C" osd create >/dev/null
ceph-osd -c "$C" -i 0 --mkfs 2>/dev/null
ceph-mgr -c "$C" -i x
ceph-osd -c "$C" -i 0 2>/dev/null
ceph -c "$C" osd crush add osd.0 1.0 root=default host=localhost 2>/dev/null || true
for _ in $(seq 40); do ceph -c "$C" pg stat 2>/dev/null | grep -q 'active+clean' && break; sleep 1; done
radosgw -c "$C" -n client.rgw.a
for _ in $(seq 60); do curl -s -o /dev/null http://127.0.0.1:$PORT/ && break; sleep 1; done
radosgw-admin -c "$C" user create --uid=t --display-name=t --access-key=tkey --secret=tsecret >/dev/null
echo "S3 ready: http://127.0.0.1:$PORT key tkey secret tsecret"
