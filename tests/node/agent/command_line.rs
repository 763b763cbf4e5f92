//! Command line of the binary under the names `kubelet` and `berth`.

use std::process::{Command, Output};

use crate::agent::ScriptedServer;
use berth_testkit::process::{BinaryName, manifest, skips};

fn run(name: &str, arguments: &[&str]) -> Output {
    let dir = tempfile::tempdir().expect("a folder");
    let program = dir.path().join(name);
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_berth"), &program).expect("a link");
    Command::new(program).args(arguments).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Name and arguments, exit code, and a part of stdout or stderr.
#[test]
fn calls_and_their_answers() {
    let rows: &[(&str, &[&str], i32, &str, &str)] = &[
        ("kubelet", &["--version"], 0, "Kubernetes v1.36.2\n", ""), // AC-01-1
        ("kubelet", &["run"], 1, "", "unknown command run"),        // AC-01-2
        ("kubelet", &["--foo"], 1, "", "\"command failed\" err=\"failed to parse kubelet flag: unknown flag: --foo\""),
        ("kubelet", &["--help"], 0, "--container-runtime-endpoint", ""),
        ("berth", &["version"], 0, "(kubelet v1.36.2)", ""),
        ("berth", &["run", "--version"], 0, "v1.36.2", ""),
        ("berth", &[], 2, "", "Usage: berth"),
        ("berth", &["nonsense"], 2, "", "nonsense"),
        ("kubelet", &["--config=/nowhere/at/all"], 1, "", "failed to load kubelet config file, path: /nowhere/at/all"),
        // AC-01-42
        (
            "kubelet",
            &["--kube-api-burst=-1"],
            1,
            "",
            "kubeAPIBurst (--kube-api-burst) -1 must not be a negative number",
        ),
    ];
    for (name, arguments, code, out, err) in rows {
        let output = run(name, arguments);
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(*code), "{name} {arguments:?}: {stdout}{stderr}");
        assert!(stdout.contains(out) && stderr.contains(err), "{name} {arguments:?}: {stdout}{stderr}");
    }
}

/// Settings that require a cluster are rejected by name, not ignored.
#[test]
fn what_needs_a_cluster_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = dir.path().join("config.yaml");
    std::fs::write(
        &config,
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nfailCgroupV1: false\n",
    )
    .expect("written");
    let config = format!("--config={}", config.display());
    let root = format!("--root-dir={}", dir.path().display());
    let rows: &[(&[&str], &str)] = &[
        // AC-01-24
        (&[], "failed to run Kubelet: no client provided, cannot use webhook authentication"),
        (
            &["--authentication-token-webhook=false"],
            "failed to run Kubelet: no client provided, cannot use webhook authorization",
        ),
        (&["--kubeconfig=/k.conf", "--bootstrap-kubeconfig=/b.conf"], "failed to run Kubelet: "),
    ];
    for (flags, expected) in rows {
        let output = run("kubelet", &[&[config.as_str(), root.as_str()], *flags].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{flags:?}: {stderr}");
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_runs_pods_by_either_name() {
    if skips("it_runs_pods_by_either_name") {
        return;
    }
    for called in [BinaryName::Kubelet, BinaryName::Berth] {
        let runtime = ScriptedServer::new().await;
        let home = runtime.home().binary_name(called);
        home.put_pod(&manifest("one"));
        let agent = home.start().await;
        agent.until_ready("one").await;
        // AC-01-25
        let answer = agent.healthz("/healthz").await.expect("an answer");
        assert_eq!((answer.status, answer.body.as_str()), (200, "ok"));
        assert!(answer.head.to_lowercase().contains("content-type: text/plain; charset=utf-8"), "{}", answer.head);
        let answer = agent.get("/healthz?verbose").await.expect("an answer");
        // The reference's checks, and those of our own tasks (spec 05 §11).
        let expected = "[+]ping ok\n[+]log ok\n[+]syncloop ok\n[+]device-plugin ok\n[+]probes ok\n[+]eviction-watcher ok\n[+]eviction ok\n\
                        healthz check passed\n";
        assert_eq!((answer.status, answer.body.as_str()), (200, expected));
        assert_eq!(agent.get("/configz").await.expect("an answer").status, 404);
        assert_eq!(agent.stop().await, Some(0));
    }
}
