# Execute the part of a run that belongs to one host, for executor ssh. The run's process (bench/jobs/ssh.py)
# sends this text to `bash -s` on each host, then variables and the line `bench_host; exit`. During the run,
# it sends one command per line:
#   .               the process is alive
#   go ENDPOINT HOSTS ADDRESSES   start the cell's script with this rendezvous
#   stop            end the run
#   done, keep      the files have been copied, or not: remove the folder that was created here, or keep it
# If no line arrives in time, the process or the connection is gone, and the run is ended.
# Answers are lines of standard output that begin with the mark:
#   ready WHERE PORT NAME    busy JOB (PROCESS)    refused PROBLEM; REMEDY    measured    ended EXIT_CODE
# If the run's folder is not shared, an archive of the host's files follows the last answer.
#
# The variables: mark, job, folder (of submission), run_dir, token (a file's name), script (text), node,
# address, peer, python (empty: the set-up lines' own), holder (words), patience (s), epochs (empty: the program
# is not ended after its measurement). The function pass_variables exports the variables of cluster.env_from;
# await_child and await_measurement are those of measured.j2.

say() { printf '%s %s\n' "$mark" "$*"; }

refuse() { # PROBLEM; REMEDY
  say refused "$*"
  return 1
}

# Kill the processes of a job and wait until they are gone. They are found by the job's name in their environment,
# because ranks have sessions of their own and are not in the process group of their agent.
kill_processes() {
  local pids i
  for ((i = 0; i < 100; i++)); do
    pids=$(grep -lz "^BENCH_SSH_JOB=$1" /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\n')
    [ -n "$pids" ] || return
    kill -KILL $pids 2>/dev/null
    sleep 0.1
  done
}

# Open this user's lock of this host as descriptor 9; `lock` is its path. No other user may write to its folder:
# in a shared folder such as /tmp, they could create the lock first, or a link in its place. Hosts may share the
# cache folder, so the lock's name contains the host's.
open_lock() {
  local parent locks cache=${XDG_CACHE_HOME:-~/.cache}
  for parent in "${XDG_RUNTIME_DIR:-/run/user/$EUID}" "$cache"; do
    locks=$parent/ddp-scaling-bench-locks
    lock=$locks/ssh-$(uname -n).lock
    [ "$parent" != "$cache" ] || mkdir -p -m 700 -- "$cache" 2>/dev/null
    [ -O "$parent" ] || continue
    mkdir -m 700 -- "$locks" 2>/dev/null
    # A folder of this user (4) with mode 700 (1c0); setgid is inherited.
    [[ $(stat -c '%u %f' -- "$locks" 2>/dev/null) = "$EUID 4"?c0 ]] || continue
    (umask 077 && : >>"$lock") 2>/dev/null && exec 9<>"$lock" && return
  done
  return 1
}

next_word() { read -r -t "$patience" word rest; }

prepare() {
  local tool lock error="it cannot be opened"
  for tool in flock setsid stat tar; do
    command -v "$tool" >/dev/null ||
      refuse "lacks the command $tool; install util-linux (flock, setsid), coreutils and tar on that host" || return
  done
  # One run at a time, of all studies, because a second one would disturb the measurement.
  if ! { open_lock && error=$(flock -w 2 9 2>&1); }; then
    [ -n "$error" ] || { say busy "$(head -n 1 "$lock")"; return 1; }
    refuse "cannot lock $lock (${error##*: }); check that the file and its folder belong to you, that the folder has" \
      "mode 700, and that the disk is not full; XDG_RUNTIME_DIR on that host selects another folder" || return
  fi
  printf '%s\n' "$holder" >"$lock"
  # With the lock held, processes that still run were left by a killed shell like this one.
  kill_processes ''
  error=$(cd -- "$folder" 2>&1) && cd -- "$folder" ||
    refuse "cannot enter the folder in which \`bench submit\` was called, $folder: ${error##*: }; run \`bench" \
      "submit\` in a folder that every host has: a shared one, or a copy at the same path" || return
  where=shared work=$run_dir
  [ ! -r "$run_dir/$token" ] || [ ! -w "$run_dir" ] || return 0
  where=apart work=$folder/.bench-$job
  rm -rf -- "$work"
  error=$(mkdir -m 700 -- "$work" 2>&1) ||
    refuse "cannot create a folder for results in $folder: ${error##*: }; run \`bench submit\` in a folder that" \
      "is writable on every host"
}

free_port() { # below the ephemeral range (32768 and up)
  local port
  while port=$((20000 + RANDOM % 10000)) && (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
  echo "$port"
}

run_script() {
  local endpoint hosts addresses why= variables watcher=
  read -r endpoint hosts addresses <<<"$rest"
  variables=("BENCH_SSH_JOB=$job" "BENCH_HOSTS=$hosts" "BENCH_ADDRESS=$address" "BENCH_PEER=$peer"
    "BENCH_ADDRESSES=$addresses")
  [ -z "$python" ] || variables+=("BENCH_PYTHON=$python")
  trap 'why=stopped' TERM
  trap 'why=lost' HUP
  # A process group of its own, to be ended as one, without the lock and without standard input.
  {
    set -- env "${variables[@]}" setsid bash /dev/fd/8 "$work" "$node" "$endpoint" "$job"
    pass_variables
    exec "$@"
  } </dev/null 8<<<"$script" 9>&- &
  child=$!
  {
    while next_word && kill -0 $$; do
      [ "$word" != stop ] || { kill -TERM $$ && exit; }
    done
    # If the main shell was killed, end its processes here.
    kill -HUP $$ || kill_processes "$job"
  } <&0 9>&- 2>/dev/null &
  listener=$!
  if [ -n "$epochs" ]; then # the run's process then ends the run on all hosts
    { await_measurement "$work" "$epochs" && say measured; } </dev/null 9>&- 2>/dev/null &
    watcher=$!
  fi
  wait "$child"
  code=$?
  if [ -n "$why" ]; then
    # Give the agent time to end its ranks and report it. This shell's message "Killed" must not get into the run's
    # log, where it would look like the kernel's.
    { kill -TERM -- "-$child"; await_child 10 9>&-; kill_processes "$job"; wait "$child"; } 2>/dev/null
    code=$?
  fi
  kill "$listener" $watcher 2>/dev/null
  wait "$listener" $watcher 2>/dev/null
  kill_processes "$job" # ranks outlive a killed agent
  [ "$why" != lost ]
}

bench_host() {
  local word rest where=shared work code child listener
  trap : PIPE
  prepare || return
  say ready "$where" "$(free_port)" "$(uname -n)"
  while next_word && [ "$word" = . ]; do :; done
  if [ "$word" = go ] && run_script; then
    say ended "$code"
    [ "$where" = shared ] || tar -cf - -C "$work" .
    while next_word && [ "$word" != done ]; do
      [ "$word" != keep ] || return
    done
  fi
  [ "$where" = shared ] || rm -rf -- "$work"
}
