//! Launched process: arguments, environment, user, capabilities, seccomp, and exit status.

use berth_shim::plan::{Capabilities, FailureKind, RootKind};

use berth_testkit::launch_fixture::{LaunchFixture, is_root, run, shell, stdout_of};

#[test]
fn a_program_runs_with_its_arguments_environment_directory_and_user() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        assert_eq!(stdout_of(run(&bench.plan(&["echo", "hello", "world"]))), "hello world\n");
        let script = "echo $A; pwd; id -u; id -g; id -G; stat -c '%u %a' . /dev/stdout -L; umask";
        let out = shell(
            bench,
            |plan| {
                plan.process.cwd = "/made/on the way".to_owned();
                (plan.process.uid, plan.process.gid, plan.process.groups) = (1000, 2000, vec![2000, 3000]);
            },
            script,
        );
        assert_eq!(out, "b c\n/made/on the way\n1000\n2000\n2000 3000\n0 755\n1000 600\n0022\n");
    });
}

#[test]
fn exit_codes_are_reported_unchanged() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 0), ("sleep 0; exit 255", 255)] {
            let ended = run(&bench.plan(&["sh", "-c", script])).expect("it runs");
            // Process 1 of a PID namespace cannot kill itself.
            assert_eq!(ended.code, code, "{script}");
        }
        let mut running = berth_testkit::launch_fixture::start(
            &bench.plan(&["sh", "-c", "echo up; cat"]),
            &berth_testkit::launch_fixture::NOTHING,
        )
        .expect("it runs");
        assert_eq!(running.line(), "up");
        running.write_input("from outside\n");
        assert_eq!(running.line(), "from outside");
        let pid = nix::unistd::Pid::from_raw(running.pid.cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("there");
        assert_eq!(running.end().code, 137);
    });
}

#[test]
fn a_program_that_cannot_run_is_reported() {
    // AC-09a-X6
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        for (args, text) in [
            (["nothing"], "exec: \"nothing\": executable file not found in $PATH"),
            (["/no/thing"], "exec: \"/no/thing\": stat /no/thing: no such file or directory"),
            (["/etc/passwd"], "exec: \"/etc/passwd\": permission denied"),
            (["/etc"], "exec: \"/etc\": permission denied"),
        ] {
            let failure = run(&bench.plan(&args)).expect_err(text);
            assert_eq!((failure.kind, failure.text.as_str()), (FailureKind::Program, text));
        }
        let script = bench.at("layers/2/d/etc/script");
        std::fs::write(&script, "no program").expect("writable");
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("settable");
        let failure = run(&bench.plan(&["/etc/script"])).expect_err("no program");
        assert_eq!(failure.text, "exec: \"/etc/script\": exec format error");
        let mut plan = bench.plan(&["true"]);
        if let RootKind::Overlay { lower, .. } = &mut plan.root.kind {
            lower.push("9/d".to_owned());
        }
        let failure = run(&plan).expect_err("no such layer");
        assert!(failure.text.starts_with("mount overlay lowerdir=2/d:1/d:9/d,"), "{}", failure.text);
        assert!(failure.text.ends_with(": no such file or directory"), "{}", failure.text);
    });
}

fn status(text: &str, field: &str) -> String {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t"));
    line.expect("a field of the status").to_owned()
}

#[test]
fn rights_are_those_of_the_plan() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let default = berth_testkit::launch_fixture::DEFAULT_CAPABILITIES;
        let net_raw = 1 << 13;
        let none = Capabilities::default();
        let whole = Capabilities { bounding: default, effective: default, permitted: default, ..none };
        let ambient = Capabilities { inheritable: net_raw, ambient: net_raw, ..whole };
        for (uid, given, inheritable, permitted, effective, bounding, kept) in [
            (0, whole, 0, default, default, default, 0),
            (0, none, 0, 0, 0, 0, 0),
            (1000, whole, 0, 0, 0, default, 0),
            (1000, ambient, net_raw, net_raw, net_raw, default, net_raw),
        ] {
            let change = |plan: &mut berth_shim::plan::LaunchPlan| {
                (plan.process.uid, plan.process.capabilities) = (uid, given);
            };
            let text = shell(bench, change, "cat /proc/self/status");
            for (field, expected) in [
                ("CapInh", inheritable),
                ("CapPrm", permitted),
                ("CapEff", effective),
                ("CapBnd", bounding),
                ("CapAmb", kept),
            ] {
                assert_eq!(status(&text, field), format!("{expected:016x}"), "{uid} {field}");
            }
            assert_eq!((status(&text, "NoNewPrivs"), status(&text, "Seccomp")), ("0".to_owned(), "0".to_owned()));
        }
    });
}

#[test]
fn signals_are_unblocked_with_default_dispositions() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let text = stdout_of(run(&bench.plan(&["cat", "/proc/self/status"])));
        for field in ["SigBlk", "SigIgn", "SigCgt"] {
            assert_eq!(status(&text, field), "0000000000000000", "{field}");
        }
    });
}

/// A seccomp filter that allows everything but mkdir, which fails with EPERM.
pub fn no_mkdir() -> Vec<u8> {
    let number = if cfg!(target_arch = "x86_64") { 83_u32 } else { 34 };
    let records: [(u16, u8, u8, u32); 4] =
        [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x0005_0001), (0x06, 0, 0, 0x7fff_0000)];
    let record = |(code, jt, jf, k): (u16, u8, u8, u32)| {
        let mut bytes = code.to_ne_bytes().to_vec();
        bytes.extend([jt, jf]);
        bytes.extend(k.to_ne_bytes());
        bytes
    };
    records.into_iter().flat_map(record).collect()
}

#[test]
fn a_filter_is_in_force_with_and_without_new_privileges() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        for (uid, no_new_privileges) in [(0, false), (0, true), (1000, false), (1000, true)] {
            let change = |plan: &mut berth_shim::plan::LaunchPlan| {
                plan.process.seccomp = Some(no_mkdir());
                plan.process.no_new_privileges = no_new_privileges;
                plan.process.uid = uid;
            };
            let text = shell(bench, change, "cat /proc/self/status; mkdir /tmp/x 2>/dev/null || echo refused");
            assert_eq!(status(&text, "Seccomp"), "2");
            assert_eq!(status(&text, "NoNewPrivs"), if no_new_privileges { "1" } else { "0" });
            let permitted = if uid == 0 { berth_testkit::launch_fixture::DEFAULT_CAPABILITIES } else { 0 };
            assert_eq!(status(&text, "CapPrm"), format!("{permitted:016x}"), "nothing is left of what set the filter");
            assert!(text.ends_with("refused\n"));
        }
    });
}
