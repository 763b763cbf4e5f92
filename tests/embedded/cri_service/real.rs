//! Pods of the embedded runtime on this machine's kernel: shim, namespaces, overlay, cgroups, logs.
//!
//! Every test has its own network namespace, so that bridge, packet filter, and sysctls of this machine stay unchanged,
//! and leftovers of a failed test are cleaned up.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use berth_cri::RuntimeService;
use berth_metrics::Registry;
use berth_proto::cri;

use berth_testkit::embedded::{
    cleanup,
    fixture::in_network_namespace,
    in_process::{container, daemon, pod},
};

mod changes;
mod confinement;
mod filesystems;
mod full_disk;
mod hooks;
mod images;
mod lifecycle;
mod network;
mod stats;

#[test]
fn a_pod_of_busybox_runs_logs_executes_stops_and_leaves_nothing() {
    in_network_namespace("a_pod_of_busybox_runs_logs_executes_stops_and_leaves_nothing", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let id = daemon
            .start(
                &sandbox,
                container("c", "echo hello; echo oops >&2; trap 'exit 3' TERM; while :; do sleep 0.1; done"),
            )
            .await;
        let status = daemon.status(&id).await;
        assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
        let (out, code) = daemon.exec(&id, "cat /proc/1/cmdline | tr '\\0' ' '; hostname; exit 5").await;
        assert!(out.starts_with("/bin/sh -c echo hello") && code == 5, "{out:?} {code}");
        // AC-09a-X7
        let begun = Instant::now();
        assert_eq!(daemon.exec(&id, "sleep 300 & echo hi").await, ("hi\n".to_owned(), 0));
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        // C9: probes and hooks set their output limit; other output is kept up to 16 MiB.
        let connection = daemon.connection(&Registry::new());
        let flood = ["/bin/sh", "-c", "head -c 20000000 /dev/zero | tee /dev/stderr"].map(str::to_owned);
        let output = connection.runtime.exec_sync(&id, &flood, Duration::from_secs(60), 10_240).await.expect("runs");
        assert_eq!((output.stdout.len(), output.stderr.len()), (10_240, 10_240));
        let (out, _) = daemon.exec(&id, "mknod /tmp/sda b 8 0 && head -c 1 /tmp/sda; echo done").await;
        assert_eq!(out, "done\n", "devices of the host are out of reach");
        let log = fs::read_to_string(&status.log_path).expect("a log");
        assert!(log.contains(" stdout F hello\n") && log.contains(" stderr F oops\n"), "{log:?}");
        let request = cri::StopContainerRequest { container_id: id.clone(), timeout: 10 };
        daemon.calls.rpc.clone().stop_container(request).await.expect("stops");
        let status = daemon.exited(&id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));
        // AC-09a-X6
        let missing = cri::ContainerConfig { command: vec!["/nowhere".to_owned()], ..container("m", "") };
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: Some(missing),
            sandbox_config: None,
        };
        let missing = daemon.calls.rpc.clone().create_container(request).await.expect("made").into_inner().container_id;
        let request = cri::StartContainerRequest { container_id: missing.clone() };
        let refused = daemon.calls.rpc.clone().start_container(request).await.expect_err("missing");
        assert!(refused.message().contains("/nowhere"), "{refused:?}");
        let status = daemon.status(&missing).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"));
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}

#[test]
fn nothing_of_the_runtime_is_reached_by_other_users_of_the_host() {
    in_network_namespace("nothing_of_the_runtime_is_reached_by_other_users_of_the_host", async |place| {
        // CVE-2021-41103, CVE-2024-25621: images and containers contain setuid-root programs.
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let script = "cp /bin/busybox /tmp/own; chmod 4755 /tmp/own; mkdir /tmp/d; while :; do sleep 1; done";
        let id = daemon.start(&sandbox, container("c", script)).await;
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("set");
        let all = directories(place.path());
        assert!(all.iter().any(|path| path.ends_with(&id)), "{all:?}");
        for path in all {
            let can_stat = |path: &Path| {
                let mut command = Command::new("/bin/busybox");
                command.args(["stat", "-c", "%a"]).arg(path).uid(65_534).gid(65_534);
                command.output().expect("busybox runs").status.success()
            };
            assert!(!can_stat(&path.join(".")), "uid 65534 reaches {}", path.display());
        }
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

/// Directories that the runtime creates, with those of its images and containers.
fn directories(place: &Path) -> Vec<PathBuf> {
    let mut all = vec![place.join("root"), place.join("state")];
    let mut next = 0;
    while let Some(path) = all.get(next).cloned() {
        next += 1;
        // Deeper levels are the content of an image or container, thousands of directories.
        if path.components().count() < place.components().count() + 5 {
            let entries = fs::read_dir(&path).into_iter().flatten().flatten();
            all.extend(entries.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()));
        }
    }
    all
}

#[test]
fn pods_outlive_the_daemon_and_a_killed_shim_is_noticed() {
    in_network_namespace("pods_outlive_the_daemon_and_a_killed_shim_is_noticed", async |place| {
        // AC-09-E2, small
        let at = place.path().to_owned();
        let first = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            let started = runtime.block_on(async {
                let daemon = daemon(&at).await;
                let sandbox = daemon.run(pod(&at, "b")).await;
                let on = daemon.start(&sandbox, container("on", "while :; do echo tick; sleep 0.05; done")).await;
                let ends = daemon.start(&sandbox, container("ends", "sleep 0.5; exit 42")).await;
                (sandbox, daemon.status(&on).await, ends)
            });
            // As if the daemon was killed: no task is canceled gracefully.
            runtime.shutdown_timeout(Duration::from_millis(100));
            started
        });
        let (sandbox, on, ends) = first.join().expect("ran");
        tokio::time::sleep(Duration::from_millis(700)).await;
        let daemon = daemon(place.path()).await;
        assert_eq!(daemon.status(&on.id).await, on);
        assert_eq!(daemon.exited(&ends).await.exit_code, 42);
        assert_eq!(daemon.exec(&on.id, "echo hi").await, ("hi\n".to_owned(), 0));
        // AC-09-E3
        cleanup::end(cleanup::shim_of(&place.path().join("state/s").join(&sandbox)).expect("a shim"));
        let begun = Instant::now();
        let status = daemon.exited(&on.id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}
