//! Containers in the namespaces of a pod.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::{AsFd, OwnedFd},
};

use berth_shim::{
    child::{CreatedNamespaces, PodContext, make_namespaces_with},
    plan::{Access, Namespace, NamespacePlan, PidNamespace, Propagation, ShimFailure},
};

use berth_testkit::launch_fixture::{
    LaunchFixture, MAP, NOTHING, RunningProcess, bind, exec, image, is_root, process, start, stdout_of,
};

fn make(plan: &NamespacePlan) -> Result<CreatedNamespaces, ShimFailure> {
    let program = File::open(env!("CARGO_BIN_EXE_berth-shim")).expect("the shim is built");
    make_namespaces_with(plan, program.as_fd())
}

fn around(made: &CreatedNamespaces) -> PodContext<'_> {
    PodContext { namespaces: &made.namespaces, target: None, users: None }
}

/// Opens a pidfd of a process.
fn opened(pid: u32) -> OwnedFd {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a number");
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("it runs")
}

fn plan(made: &[Namespace]) -> NamespacePlan {
    NamespacePlan { made: made.to_vec(), hostname: "pod".to_owned(), ..NamespacePlan::default() }
}

#[test]
fn containers_of_a_pod_share_its_namespaces() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let mut wanted = plan(&[Namespace::Uts, Namespace::Network, Namespace::Ipc]);
        wanted.sysctls = BTreeMap::from([
            ("net/ipv4/ip_unprivileged_port_start".to_owned(), "0".to_owned()),
            ("kernel/shm_rmid_forced".to_owned(), "1".to_owned()),
        ]);
        let made = make(&wanted).expect("made");
        let kinds: Vec<Namespace> = made.namespaces.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [Namespace::Network, Namespace::Ipc, Namespace::Uts]);
        let script = "hostname; cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/kernel/shm_rmid_forced; cat \
                      /sys/class/net/lo/flags; for n in net ipc uts; do readlink /proc/self/ns/$n; done";
        let first = stdout_of(start(&bench.plan(&["sh", "-c", script]), &around(&made)).map(RunningProcess::end));
        assert!(first.starts_with("pod\n0\n1\n0x9\n"), "{first}");
        assert_eq!(stdout_of(start(&bench.plan(&["sh", "-c", script]), &around(&made)).map(RunningProcess::end)), first);
        wanted.sysctls = BTreeMap::from([("../../etc/x".to_owned(), String::new())]);
        assert_eq!(make(&wanted).expect_err("no setting").text, "invalid sysctl \"../../etc/x\"");
    });
}

#[test]
fn process_visibility_follows_the_plan() {
    // AC-09a-X14
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let wanted = NamespacePlan { shares_processes: true, ..plan(&[Namespace::Uts]) };
        let made = make(&wanted).expect("made");
        let init = opened(made.init.expect("process 1"));
        let around = PodContext { target: Some(init.as_fd()), ..around(&made) };
        let mut pod = bench.plan(&["sh", "-c", "ls /proc/1/root/ 2>&1; ls /proc/1/fd 2>&1; cat /proc/1/status; cat"]);
        pod.processes = PidNamespace::Pod;
        let out = stdout_of(start(&pod, &around).map(RunningProcess::end));
        assert!(out.starts_with("ls: /proc/1/root/: Permission denied\nName:\tberth-shim\n"), "{out}");
        assert!(out.contains("Uid:\t65535\t65535\t65535\t65535\n") && out.contains("CapBnd:\t0000000000000000\n"));
        // Even with every capability over it there is nothing to read.
        let all = (1 << 38) - 1;
        let sets = &mut pod.process.capabilities;
        (sets.bounding, sets.effective, sets.permitted) = (all, all, all);
        pod.process.args = ["sh", "-c", "ls -a /proc/1/root/; ls /proc/1/fd"].map(str::to_owned).to_vec();
        assert_eq!(stdout_of(start(&pod, &around).map(RunningProcess::end)), ".\n..\n");

        let mut own = bench.plan(&["sh", "-c", "echo up; cat"]);
        own.container = "target".to_owned();
        let mut target = start(&own, &NOTHING).expect("it runs");
        assert_eq!(target.line(), "up");
        let script = "cat /proc/1/cmdline | wc -c; [ $$ = 1 ] && echo first; readlink /proc/self/ns/pid";
        let process = opened(target.pid);
        let see = |processes| {
            let mut plan = bench.plan(&["sh", "-c", script]);
            plan.processes = processes;
            stdout_of(start(&plan, &PodContext { target: Some(process.as_fd()), ..around }).map(RunningProcess::end))
        };
        let line = |text: &str, index: usize| text.lines().nth(index).unwrap_or_default().to_owned();
        let of_target =
            format!("{}\n", std::fs::read_link(format!("/proc/{}/ns/pid", target.pid)).expect("read").display());
        assert!(see(PidNamespace::Of("target".to_owned())).ends_with(&of_target));
        assert_eq!(line(&see(PidNamespace::Own), 1), "first");
        let host = format!("{}\n", std::fs::read_link("/proc/self/ns/pid").expect("a link").display());
        assert!(see(PidNamespace::Host).ends_with(&host));
        target.kill();
        let init = nix::unistd::Pid::from_raw(made.init.expect("process 1").cast_signed());
        nix::sys::signal::kill(init, nix::sys::signal::Signal::SIGTERM).expect("there");
        assert_eq!(berth_testkit::launch_fixture::reap(init.as_raw().cast_unsigned()), 0);
    });
}

#[test]
fn a_pod_may_have_users_of_its_own() {
    // AC-09a-X10
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let all = [Namespace::User, Namespace::Network, Namespace::Ipc, Namespace::Uts];
        let wanted = NamespacePlan { users: Some((MAP, MAP)), shares_processes: true, ..plan(&all) };
        let made = make(&wanted).expect("made");
        let init = opened(made.init.expect("process 1"));
        let around = PodContext { users: Some((MAP, MAP)), target: Some(init.as_fd()), ..around(&made) };
        let volume = bench.volume("volume");
        let script = "cat /proc/self/uid_map; id -u; stat -c '%u %g %n' / /etc/passwd /dev/null /v/file /one/etc/passwd /both/etc/passwd; echo x > \
                      /dev/null && echo written; touch /etc/mine && stat -c %u /etc/mine; hostname; [ $$ = 1 ] && echo \
                      first; echo up; cat";
        let mut plan = bench.plan(&["sh", "-c", script]);
        let mut shown = bind(&volume, "/v", Access::ReadOnly, Propagation::Private);
        shown.ids = Some((MAP, MAP));
        plan.mounts.push(shown);
        plan.mounts.push(image(bench, "/one", &["2/d"]));
        plan.mounts.push(image(bench, "/both", &["2/d", "1/d"]));
        let mut container = start(&plan, &around).expect("it runs");
        let map: Vec<String> = container.line().split_whitespace().map(str::to_owned).collect();
        assert_eq!(map, ["0", "200000", "65536"]);
        for expected in
            ["0", "0 0 /", "0 0 /etc/passwd", "0 0 /dev/null", "0 0 /v/file", "0 0 /one/etc/passwd", "0 0 /both/etc/passwd", "written", "0", "pod", "first", "up"]
        {
            assert_eq!(container.line(), expected);
        }
        let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(bench.at("u/etc/mine")).expect("made"));
        assert_eq!(owner, 200_000);
        let mut given = process(&["sh", "-c", "cat /proc/self/uid_map; id -u; cat /etc/passwd > /dev/stdout"]);
        (given.uid, given.gid) = (1000, 1000);
        let out = stdout_of(exec(&plan, container.pid, given).map(RunningProcess::end));
        let words: Vec<&str> = out.split_whitespace().collect();
        assert_eq!(words.get(..4), Some(&["0", "200000", "65536", "1000"][..]), "{out}");
        container.kill();
        plan.processes = PidNamespace::Pod;
        plan.process.args = ["sh", "-c", "ls /proc/1/root 2>&1; stat -c %u /proc/1"].map(str::to_owned).to_vec();
        let out = stdout_of(start(&plan, &around).map(RunningProcess::end));
        assert!(out.starts_with("ls: /proc/1/root: Permission denied\n"), "{out}");
    });
}
