//! Resource limits, cgroups, and hanging launches.

use std::{fs, io::Read, time::Instant};

use berth_shim::child::{LaunchProgress, Stdio, begin_launch};

use berth_testkit::launch_fixture::{
    LaunchFixture, NOTHING, PATIENCE, RunningProcess, exec, is_root, process, readable, reap, shell, start, stdout_of,
};

#[test]
fn limits_are_set() {
    // AC-09a-X16: raising a limit without the capability is no error.
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let nofile = nix::libc::RLIMIT_NOFILE;
        let out = shell(
            bench,
            |plan| {
                plan.process.limits = vec![(nofile, 64, 128), (nix::libc::RLIMIT_CORE, 0, u64::MAX)];
                plan.process.oom_score_adj = Some(500);
            },
            "ulimit -n; ulimit -Hn; ulimit -c; cat /proc/self/oom_score_adj",
        );
        assert_eq!(out, "64\n128\n0\n500\n");
        let out = shell(bench, |plan| plan.process.oom_score_adj = Some(-997), "cat /proc/self/oom_score_adj");
        let own = fs::read_to_string("/proc/self/oom_score_adj").expect("readable");
        assert!(["-997\n", own.as_str()].contains(&out.as_str()), "{out}");
    });
}

#[test]
fn a_program_is_born_in_its_groups() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let plan = bench.plan(&[]);
        let out = shell(bench, |plan| plan.processes = berth_shim::plan::PidNamespace::Host, "cat /proc/$$/cgroup");
        for group in &plan.groups {
            let name = group.file_name().expect("a name").to_str().expect("text");
            assert_eq!(out.matches(name).count(), plan.groups.len(), "{out}");
        }
    });
}

#[test]
fn a_launch_that_hangs_is_killed() {
    if !is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    // A process born in a frozen cgroup does not run, but can be killed.
    let frozen = bench.plan(&[]).groups.into_iter().find(|group| group.join("cgroup.freeze").exists());
    let Some(frozen) = frozen else {
        eprintln!("skipped: needs the unified hierarchy");
        return;
    };
    bench.shim(|bench| {
        fs::write(frozen.join("cgroup.freeze"), "1").expect("freezable");
        let ((input, _to), (mut from, output), (_err, error)) =
            (std::io::pipe().expect("a pipe"), std::io::pipe().expect("a pipe"), std::io::pipe().expect("a pipe"));
        let stdio = Stdio::Files([input.into(), output.into(), error.into()]);
        let launching = begin_launch(&bench.plan(&["true"]), &NOTHING, stdio).expect("begun");
        let LaunchProgress::Pending(launching) = launching.advance() else { panic!("it cannot be there") };
        launching.kill();
        readable(&launching, Instant::now() + PATIENCE);
        let LaunchProgress::Failed(failure) = launching.advance() else { panic!("it was killed") };
        assert_eq!(failure.text, "helper process was killed before the container process started");
        assert_eq!(from.read(&mut [0]).expect("readable"), 0, "its pipes are closed");
        let children = fs::read_to_string(format!("/proc/self/task/{}/children", nix::unistd::gettid()));
        let helper = children.expect("readable").trim().parse().expect("one child");
        assert_eq!(reap(helper), 137);
        fs::write(frozen.join("cgroup.freeze"), "0").expect("thawable");
    });
}

#[test]
fn a_container_may_see_its_group_as_the_root() {
    if !is_root() {
        return;
    }
    let bench = LaunchFixture::new();
    let unified: Vec<_> = bench.plan(&[]).groups.into_iter().filter(|g| g.join("cgroup.freeze").exists()).collect();
    if unified.is_empty() {
        eprintln!("skipped: needs the unified hierarchy");
        return;
    }
    bench.shim(|bench| {
        let script = "grep ^0: /proc/self/cgroup; cat /sys/fs/cgroup/cgroup.procs; cat /sys/fs/cgroup/cgroup.freeze; \
                      echo 1 2>/dev/null > /sys/fs/cgroup/cgroup.freeze || echo read-only; echo up; cat";
        let mut plan = bench.plan(&["sh", "-c", script]);
        (plan.groups, plan.has_group_namespace) = (unified, true);
        let mut container = start(&plan, &NOTHING).expect("it runs");
        let lines: Vec<String> = std::iter::repeat_with(|| container.line()).take_while(|line| line != "up").collect();
        assert_eq!(lines.first().map(String::as_str), Some("0::/"));
        // Preceded by the cgroup's members; the launch helper, which has no process id in this namespace, may be among
        // them.
        assert!(lines.ends_with(&["0".to_owned(), "read-only".to_owned()]), "not frozen, {lines:?}");
        let given = process(&["sh", "-c", "grep ^0: /proc/self/cgroup"]);
        assert_eq!(stdout_of(exec(&plan, container.pid, given).map(RunningProcess::end)), "0::/\n");
        container.kill();
    });
}
