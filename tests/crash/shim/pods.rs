//! Pods of the real shim: namespaces, a busybox root, cgroups. Needs root and `busybox-static`.

use std::{
    fs,
    io::Write,
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use berth_shim::plan::{
    ExecPlan, Exit, ExitEvent, FailureKind, LaunchPlan, Namespace, NamespacePlan, PidNamespace, ProcessTarget, Scope,
};

use crate::{
    shim::fixture::{Fixture, kind, pipe, read_all, until},
    shim_tests,
};
use berth_testkit::launch_fixture::{self, LaunchFixture};

shim_tests! {
    a_pod_runs_logs_executes_and_ends
    a_terminal_has_a_size_and_everybody_attached
    a_kill_for_want_of_memory_is_the_reason
    what_a_container_leaves_behind_is_killed
    a_shim_is_small
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_berth-shim"))
}

/// Plan of an exec process in a container.
fn exec_plan(container: &str, exec: &str, args: &[&str]) -> ExecPlan {
    ExecPlan {
        container: container.to_owned(),
        exec: exec.to_owned(),
        process: launch_fixture::process(args),
        keeps_orphans: false,
    }
}

/// Plan of a container with a log.
fn plan(rig: &Fixture, bench: &LaunchFixture, id: &str, script: &str) -> LaunchPlan {
    let plan = bench.plan(&["/bin/sh", "-c", script]);
    LaunchPlan { container: id.to_owned(), log: Some(rig.log(id)), longest_record: 16_384, ..plan }
}

fn container(event: &ExitEvent) -> (&str, Exit) {
    match &event.of {
        ProcessTarget::Container(id) | ProcessTarget::Exec(_, id) => (id, event.exit),
        ProcessTarget::Init => ("init", event.exit),
    }
}

async fn a_pod_runs_logs_executes_and_ends() {
    if !launch_fixture::is_root() {
        return;
    }
    let (leaf, benches) = (LaunchFixture::new(), [LaunchFixture::new(), LaunchFixture::new()]);
    let mut rig = Fixture::of(program()).await;
    let namespaces = NamespacePlan {
        made: vec![Namespace::Network, Namespace::Ipc, Namespace::Uts],
        hostname: "pod-a".to_owned(),
        shares_processes: true,
        groups: leaf.plan(&[]).groups,
        ..NamespacePlan::default()
    };
    let made = rig.shim.make_namespaces(namespaces.clone()).await.expect("made");
    assert_eq!(made.descriptors.len(), 3);
    let init = made.init.expect("a process 1");
    for group in &leaf.plan(&[]).groups {
        let text = fs::read_to_string(group.join("cgroup.procs")).expect("readable");
        let mut pids: Vec<&str> = text.lines().collect();
        pids.sort_by_key(|pid| pid.parse::<u32>().expect("a number"));
        assert_eq!(pids, [rig.pid, init].map(|pid| pid.to_string()), "{}", group.display());
    }
    assert_eq!(kind(rig.shim.make_namespaces(namespaces).await), FailureKind::State);
    for (id, bench) in ["a", "b"].into_iter().zip(&benches) {
        let plan = plan(&rig, bench, id, "hostname; echo err >&2; exec sleep 1000");
        rig.shim.launch(LaunchPlan { processes: PidNamespace::Pod, ..plan }).await.expect("launched");
        let mut records = rig.until_records(id, 2).await;
        records.sort();
        assert_eq!(records, ["stderr F err", "stdout F pod-a"]);
    }
    // C6: a PID namespace target is a running container by its id, even if its process id belongs to another process by
    // now.
    let unknown = plan(&rig, &leaf, "c", "exec sleep 1000");
    let unknown = LaunchPlan { processes: PidNamespace::Of("gone".to_owned()), ..unknown };
    assert_eq!(kind(rig.shim.launch(unknown).await), FailureKind::Unknown);
    let ((stdin, _), (output, stdout)) = (pipe(), pipe());
    let exec = exec_plan("a", "e", &["/bin/sh", "-c", "hostname; ps | grep -c '[s]leep 1000'; exit 9"]);
    rig.shim.exec(exec, Some([stdin.as_fd(), stdout.as_fd(), stdout.as_fd()])).await.expect("started");
    drop(stdout);
    assert_eq!(read_all(output).await, "pod-a\n2\n");
    assert_eq!(container(&rig.event().await).1.code, 9);
    let missing = rig.shim.exec(exec_plan("a", "f", &["nothing"]), Some([stdin.as_fd(); 3])).await;
    assert_eq!(kind(missing), FailureKind::Program);

    rig.again().await;
    assert_eq!((rig.hello.namespaces.len(), rig.hello.init, rig.hello.containers.len()), (3, Some(init), 2));
    rig.kill("a").await;
    // The exec's exit event was not acknowledged: it is delivered again first.
    assert_eq!(rig.hello.events.len(), 1);
    assert_eq!(container(&rig.event().await), ("a", Exit { code: 137, is_signal: true, ..rig_exit(&rig, "a") }));
    let ended = plan(&rig, &leaf, "d", "exec sleep 1000");
    let ended = LaunchPlan { processes: PidNamespace::Of("a".to_owned()), ..ended };
    assert_eq!(kind(rig.shim.launch(ended).await), FailureKind::State);
    // The kernel kills everything in the PID namespace with its process 1.
    rig.shim.signal(ProcessTarget::Init, 9, Scope::Process).await.expect("signalled");
    let mut ended = [rig.event().await, rig.event().await].map(|event| container(&event).0.to_owned());
    ended.sort();
    assert_eq!(ended, ["b", "init"]);
    rig.shim.shutdown().await.expect("received");
    assert_eq!(rig.events.next().await, None);
}

/// Exit record of a container.
fn rig_exit(rig: &Fixture, id: &str) -> Exit {
    let record = berth_shim::exit_record::ExitRecord::read(rig.folder.path(), id);
    record.expect("readable").expect("a record").exit
}

async fn a_terminal_has_a_size_and_everybody_attached() {
    if !launch_fixture::is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let mut rig = Fixture::of(program()).await;
    rig.shim.make_namespaces(NamespacePlan::default()).await.expect("nothing to make");
    let mut terminal = plan(&rig, &bench, "t", "stty size; read x; stty size; echo got $x");
    (terminal.process.terminal, terminal.stdin) = (Some((80, 25)), true);
    rig.shim.launch(terminal).await.expect("launched");
    assert_eq!(rig.until_records("t", 1).await, ["stdout F 25 80"]);
    let ((stdin, input), (output, stdout)) = (pipe(), pipe());
    rig.shim.attach("t", Some(stdin.as_fd()), stdout.as_fd(), None).await.expect("attached");
    rig.shim.resize(ProcessTarget::Container("t".to_owned()), 132, 50).await.expect("resized");
    fs::File::from(input).write_all(b"word\n").expect("written");
    drop((stdin, stdout));
    assert_eq!(container(&rig.event().await).1.code, 0);
    assert_eq!(read_all(output).await, "word\r\n50 132\r\ngot word\r\n");
    assert_eq!(rig.records("t"), ["25 80", "word", "50 132", "got word"].map(|line| format!("stdout F {line}")));

    rig.shim.launch(plan(&rig, &bench, "u", "exec sleep 1000")).await.expect("launched");
    let mut exec = exec_plan("u", "e", &["/bin/sh", "-c", "tty; exec sleep 1000"]);
    exec.process.terminal = Some((80, 25));
    let (_, master) = rig.shim.exec(exec, None).await.expect("started");
    let master = fs::File::from(master.expect("a terminal"));
    let mut text = [0; 64];
    let count = until(|| rustix::io::read(&master, &mut text).ok()).await; // the read does not block
    assert_eq!(String::from_utf8_lossy(&text[..count]), "/dev/pts/0\r\n");
    drop(master); // the client's connection is lost: the terminal hangs up
    let event = rig.event().await;
    let (id, exit) = container(&event);
    assert_eq!((id, exit.code, exit.is_signal), ("e", 129, true));
    rig.kill("u").await;
    assert_eq!(container(&rig.event().await).1.code, 137);
}

fn limit_memory(groups: &[PathBuf], bytes: u64) {
    let file = groups.iter().flat_map(|group| [group.join("memory.max"), group.join("memory.limit_in_bytes")]);
    let file = file.into_iter().find(|file| file.exists()).expect("a memory controller");
    fs::write(file, bytes.to_string()).expect("limited");
}

async fn a_kill_for_want_of_memory_is_the_reason() {
    if !launch_fixture::is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let mut rig = Fixture::of(program()).await;
    rig.shim.make_namespaces(NamespacePlan::default()).await.expect("nothing to make");
    // The shell's child is OOM-killed, and the shell exits with 137. The memory hog and its feeder have the highest
    // oom_score_adj: the kernel may kill again before the first victim's memory is freed, and must not choose the shell
    // then.
    let script = |end: &str| {
        let eats = "busybox head -c 200000000 /dev/zero | busybox tail > /dev/null";
        format!("(echo 1000 > /proc/self/oom_score_adj; {eats}); exit {end}")
    };
    let eater = plan(&rig, &bench, "a", &script("$?"));
    limit_memory(&eater.groups, 20 << 20);
    rig.shim.launch(eater).await.expect("launched");
    let event = rig.event().await;
    let (_, exit) = container(&event);
    assert_eq!((exit.code, exit.is_signal, exit.is_oom), (137, false, true));
    assert!(exit.oom_kills >= 1);
    // The same OOM kill does not explain another exit code.
    let coped = plan(&rig, &bench, "b", &script("0"));
    rig.shim.launch(coped).await.expect("launched");
    let exit = rig.event().await.exit;
    assert_eq!((exit.code, exit.is_oom, exit.oom_kills >= 1), (0, false, true));
    rig.shim.launch(plan(&rig, &bench, "c", "exit 137")).await.expect("launched");
    let exit = rig.event().await.exit;
    assert_eq!((exit.code, exit.is_oom, exit.oom_kills), (137, false, 0));
}

/// AC-09a-X15, for the shim's part.
async fn what_a_container_leaves_behind_is_killed() {
    if !launch_fixture::is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let mut rig = Fixture::of(program()).await;
    rig.shim.make_namespaces(NamespacePlan::default()).await.expect("nothing to make");
    let mut took = Vec::new();
    for id in ["a", "b", "c", "d"] {
        let plan = plan(&rig, &bench, id, "sleep 1000 & (sleep 1000 &) ; echo said; exit 4");
        let groups = plan.groups.clone();
        let start = Instant::now();
        rig.shim.launch(LaunchPlan { processes: PidNamespace::Host, ..plan }).await.expect("launched");
        assert_eq!(container(&rig.event().await).1.code, 4);
        took.push(start.elapsed());
        let is_empty =
            || groups.iter().all(|group| fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|t| t.is_empty()));
        until(|| is_empty().then_some(())).await;
    }
    // The shim waits two seconds for pipes that other processes keep open; a busy machine may take as long
    // occasionally.
    assert!(took.iter().any(|took| took.as_millis() < 1900), "it is not waited for pipes of the dead: {took:?}");
}

/// AC-09-E7, for the release binary (`SHIM_TO_MEASURE` names it); a development build is only measured.
async fn a_shim_is_small() {
    if !launch_fixture::is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let mut rig =
        Fixture::of(std::env::var_os("SHIM_TO_MEASURE").map(PathBuf::from).as_deref().unwrap_or(program())).await;
    rig.shim.make_namespaces(NamespacePlan::default()).await.expect("nothing to make");
    rig.shim.launch(plan(&rig, &bench, "a", "echo said; exec sleep 1000")).await.expect("launched");
    rig.until_records("a", 1).await;
    rig.again().await;
    let size = fs::metadata(format!("/proc/{}/exe", rig.pid)).expect("a program").len() >> 10;
    let pss = fs::read_to_string(format!("/proc/{}/smaps_rollup", rig.pid)).expect("readable");
    let pss = pss.lines().find_map(|line| line.strip_prefix("Pss:")).expect("a figure").trim().to_owned();
    let (rss, anonymous) = (rig.memory("VmRSS"), rig.memory("RssAnon"));
    println!("  shim of {size} kB with a container: RSS {rss} kB, of it anonymous {anonymous} kB, PSS {pss}");
    assert!(size > 4096 || (rss <= 1536 && anonymous <= 300), "it is too large");
    println!("  exec of true, half of them: {:?}", median_exec(&mut rig).await);
    rig.kill("a").await;
    assert_eq!(container(&rig.event().await).1.code, 137);
}

/// Median time from the exec request to the exit event, for a program that does nothing.
async fn median_exec(rig: &mut Fixture) -> Duration {
    let mut took = Vec::new();
    for round in 0..51 {
        let start = Instant::now();
        let ((stdin, _), (_output, stdout)) = (pipe(), pipe());
        let exec = exec_plan("a", &format!("e{round}"), &["/bin/true"]);
        rig.shim.exec(exec, Some([stdin.as_fd(), stdout.as_fd(), stdout.as_fd()])).await.expect("started");
        assert_eq!(container(&rig.event().await).1.code, 0);
        took.push(start.elapsed());
    }
    took.sort_unstable();
    took[took.len() / 2]
}
