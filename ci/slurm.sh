#!/usr/bin/env bash
# A real Slurm on this machine, for tests: one node, two cores, two GPUs that are only names.
#
#   ci/slurm.sh install            Debian's packages, where they are missing
#   ci/slurm.sh start FOLDER       munged, slurmctld and slurmd, all files in FOLDER
#   ci/slurm.sh controller FOLDER  start slurmctld again, after it was killed
#   ci/slurm.sh stop FOLDER        end them
#
# Needs root, as slurmd does; no systemd, no cgroups. export SLURM_CONF=FOLDER/slurm.conf after it.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"

install() {
  type slurmctld slurmd sbatch munged &> /dev/null && return
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -qq -y --no-install-recommends slurm-wlm munge > /dev/null
}

configure() {
  local host port
  host=$(hostname -s)
  port=$(shuf -i 20000-29000 -n 1)
  chmod 755 "$1"
  mkdir -p "$1"/{munge,state,spool}
  (umask 077 && head -c 1024 /dev/urandom > "$1/munge/key")
  mknod "$1/gpu0" c 1 3 # as /dev/null: Slurm wants a device
  mknod "$1/gpu1" c 1 3
  echo "Name=gpu File=$1/gpu[0-1]" > "$1/gres.conf"
  echo "CgroupPlugin=cgroup/v1" > "$1/cgroup.conf" # read, but not used
  cat > "$1/slurm.conf" << CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
SlurmdPort=$((port + 1))
AuthInfo=socket=$1/munge/socket
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool
SlurmctldPidFile=$1/slurmctld.pid
SlurmdPidFile=$1/slurmd.pid
SlurmctldLogFile=$1/slurmctld.log
SlurmdLogFile=$1/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
KillWait=2
BatchStartTimeout=600
MessageTimeout=60
UnkillableStepTimeout=600
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 RealMemory=2048 Gres=gpu:2
PartitionName=low Nodes=$host Default=YES DefMemPerCPU=500
CONF
}

controller() { slurmctld -f "$1/slurm.conf"; }

start() {
  mkdir -p "$1"
  configure "$1"
  munged --force --key-file="$1/munge/key" --socket="$1/munge/socket" \
    --pid-file="$1/munge/pid" --log-file="$1/munge/log" --seed-file="$1/munge/seed"
  controller "$1"
  slurmd -f "$1/slurm.conf"
  for _ in $(seq 600); do
    [ "$(SLURM_CONF=$1/slurm.conf sinfo -h -o %T 2> /dev/null)" = idle ] && return
    sleep 0.1
  done
  tail -n 5 "$1"/*.log >&2
  return 1
}

stop() {
  local file
  for file in "$1"/slurmd.pid "$1"/slurmctld.pid "$1"/munge/pid; do
    [ ! -s "$file" ] || kill "$(cat "$file")" 2> /dev/null || continue
    for _ in $(seq 600); do # each removes its file
      [ -s "$file" ] || break
      sleep 0.1
    done
  done
}

"$@"
