//! OCI hooks with real programs: when and in which namespaces they run, and which state they read.
//!
//! OCI runtime specification 1.2, "POSIX-platform Hooks"; spec 09a §8.4.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use berth_shim::{
    child::begin_poststop,
    plan::{Hook, HookPoint, Hooks, LaunchPlan},
};
use serde_json::Value;

use berth_testkit::launch_fixture::{self, LaunchFixture, is_root, run, stdout_of};

/// A hook that runs a shell script: with the host's shell, at `startContainer` with the container's.
fn hook(moment: HookPoint, script: &str) -> Hook {
    let args = ["sh", "-c", script].map(str::to_owned).to_vec();
    Hook { moment, path: "/bin/sh".into(), args, env: vec!["PATH=/usr/bin:/bin".into()], limit_ms: None }
}

/// Plan of a container with these hooks and a bundle.
fn plan(bench: &LaunchFixture, args: &[&str], all: Vec<Hook>) -> LaunchPlan {
    let bundle = bench.at("bundle");
    fs::create_dir_all(&bundle).expect("makeable");
    let config = serde_json::json!({"ociVersion": "1.2.0", "root": {"path": bench.at("stage")}});
    fs::write(bundle.join("config.json"), config.to_string()).expect("writable");
    let state = format!(r#""id":"c","ociVersion":"1.2.0","bundle":{bundle:?},"annotations":{{"a":"b"}}}}"#);
    LaunchPlan { hooks: Some(Box::new(Hooks { all, bundle, state })), ..bench.plan(args) }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Waits until a file ends with a complete line.
fn soon(path: &Path) -> String {
    let begun = Instant::now();
    loop {
        let text = read(path);
        if text.ends_with('\n') {
            return text;
        }
        assert!(begun.elapsed() < launch_fixture::PATIENCE, "{} stays empty", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn hooks_run_at_their_points_with_the_container_state() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let log = bench.at("log");
        // The log has this path on the host and, before pivot_root, in the container's mount namespace: hooks append to
        // it there.
        let note = |moment: HookPoint| {
            let name = moment.name();
            let script = format!("{{ printf '{name} '; cat; echo; }} >> {}", log.display());
            hook(moment, &script)
        };
        let mut all: Vec<Hook> = HookPoint::ALL.iter().rev().map(|moment| note(*moment)).collect();
        all.retain(|hook| hook.moment != HookPoint::StartContainer);
        // With the container's shell and files.
        all.push(hook(HookPoint::StartContainer, "{ id -u; cat; echo; } > /tmp/started"));
        fs::set_permissions(bench.at("layers/1/d/tmp"), std::os::unix::fs::PermissionsExt::from_mode(0o1777))
            .expect("settable");
        let mut plan = plan(bench, &["sh", "-c", "cat /tmp/started; read x"], all);
        (plan.process.uid, plan.process.gid, plan.process.groups) = (1000, 1000, vec![1000]);
        let mut running = launch_fixture::start(&plan, &launch_fixture::NOTHING).expect("it runs");
        let hooks = plan.hooks.as_deref().expect("hooks");
        let pid = running.pid;
        assert_eq!(running.line(), "1000", "as the container's user");
        let inside: Value = serde_json::from_str(&running.line()).expect("JSON");
        assert_eq!((&inside["status"], &inside["pid"]), (&"created".into(), &1.into()));
        let text = read(&log);
        let calls: Vec<(&str, Value)> = text
            .lines()
            .map(|line| line.split_once(' ').expect("a name"))
            .map(|(name, state)| (name, serde_json::from_str(state).expect("JSON")))
            .collect();
        let names: Vec<&str> = calls.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["prestart", "createRuntime", "createContainer", "poststart"]);
        for ((name, state), (status, number)) in
            calls.iter().zip([("creating", pid), ("creating", pid), ("creating", 1), ("running", pid)])
        {
            assert_eq!((&state["status"], &state["pid"]), (&status.into(), &number.into()), "{name}");
            assert_eq!((&state["id"], &state["annotations"]["a"]), (&"c".into(), &"b".into()), "{name}");
            assert_eq!(state["bundle"], bench.at("bundle").display().to_string(), "{name}");
        }
        running.write_input("\n");
        running.end();
        fs::remove_file(&log).expect("there");
        begin_poststop("c", hooks).expect("begun");
        let text = soon(&log);
        let state: Value = serde_json::from_str(text.strip_prefix("poststop ").expect("that one")).expect("JSON");
        assert_eq!((&state["status"], state.get("pid")), (&"stopped".into(), None));
    });
}

#[test]
fn hooks_are_executed_in_the_namespaces_of_their_moments() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let log = bench.at("log");
        let host = fs::read_link("/proc/self/ns/mnt").expect("there").display().to_string();
        let links = "readlink /proc/self/ns/mnt";
        let on_host = format!("{links} > {}", log.display());
        // It finds the root by the bundle, as vendors' hooks do, and changes it, although it is read-only later.
        let within = r#"bundle=$(sed 's/.*"bundle":"\([^"]*\)".*/\1/')
            root=$(sed 's/.*"path":"\([^"]*\)".*/\1/' $bundle/config.json)
            test "$PWD" = "$bundle" && readlink /proc/self/ns/mnt > $root/etc/by-hook"#;
        let script = "cat /etc/by-hook; readlink /proc/self/ns/mnt; touch /etc/x 2>/dev/null || echo sealed";
        let all = vec![hook(HookPoint::CreateRuntime, &on_host), hook(HookPoint::CreateContainer, within)];
        let mut plan = plan(bench, &["sh", "-c", script], all);
        plan.root.is_read_only = true;
        let out = stdout_of(run(&plan));
        let lines: Vec<&str> = out.lines().collect();
        let [by_hook, own, "sealed"] = lines.as_slice() else { panic!("{out}") };
        assert_eq!(read(&log).trim(), host, "createRuntime is executed on the host");
        assert_eq!(by_hook, own, "createContainer is executed in the container's namespaces");
        assert_ne!(*own, host);
    });
}

#[test]
fn a_hook_that_fails_fails_the_start() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let log = bench.at("log");
        for moment in HookPoint::ALL.into_iter().filter(|moment| *moment != HookPoint::Poststop) {
            let name = moment.name();
            let path = |text: &str| format!("{name} hook {text} failed: ");
            let failed = |hook: Hook| {
                let plan = plan(bench, &["sh", "-c", "sleep 100"], vec![hook]);
                run(&plan).expect_err(name).text
            };
            let text = failed(hook(moment, "echo some; echo words >&2; exit 3"));
            assert_eq!(text, path("/bin/sh") + "exit status 3: some\nwords");
            assert_eq!(failed(hook(moment, "kill -TERM $$")), path("/bin/sh") + "killed by signal 15");
            let missing = Hook { path: "/no/such".into(), ..hook(moment, "") };
            let expected = "exit status 127: execute hook: no such file or directory";
            assert_eq!(failed(missing), path("/no/such") + expected);
            // Its leftover processes keep the output pipe open, and are not waited for.
            let slow = Hook { limit_ms: Some(200), ..hook(moment, "echo slow; exec sleep 100") };
            assert_eq!(failed(slow), path("/bin/sh") + "timed out after 200ms: slow");
            // Later hooks are not executed.
            let second = hook(moment, &format!("echo second > {}", log.display()));
            let plan = plan(bench, &["true"], vec![hook(moment, "exit 1"), second]);
            run(&plan).expect_err(name);
            assert_eq!(read(&log), "", "{name}");
        }
        // Much output, an unread state, and a leftover process: none of them blocks.
        let loud =
            "i=0; while [ $i -lt 3000 ]; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; i=$((i+1)); done; sleep 2 &";
        let mut plan = plan(bench, &["echo", "ran"], vec![hook(HookPoint::CreateRuntime, loud)]);
        plan.hooks.as_mut().expect("hooks").state.insert_str(0, &format!("\"x\":\"{}\",", "y".repeat(200_000)));
        assert_eq!(stdout_of(run(&plan)), "ran\n");
    });
}
