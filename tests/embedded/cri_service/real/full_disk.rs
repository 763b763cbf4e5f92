//! Disk-full conditions while containers are created and removed. Spec 09 §7 (AC-09-E10).

use std::{
    fs,
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use berth_proto::cri;
use nix::mount::{MsFlags, mount};

use berth_testkit::embedded::{
    cleanup::names,
    fixture::{in_network_namespace, left},
    in_process::{container, daemon, pod},
};

/// Timeout of a step.
const LIMIT: Duration = Duration::from_secs(30);

/// Fills a file system to the last byte; if no inode is left, the file system counts as full.
fn fill(path: &Path) {
    let Ok(mut file) = fs::File::create(path) else { return };
    for size in [1 << 20, 4096, 1] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
}

#[test]
fn a_full_disk_leaves_nothing_half_made() {
    in_network_namespace("a_full_disk_leaves_nothing_half_made", async |place| {
        let root = place.path().join("root");
        fs::create_dir(&root).expect("made");
        mount(Some("small"), &root, Some("tmpfs"), MsFlags::empty(), Some("size=48m")).expect("mounted");
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let before = daemon.start(&sandbox, container("before", "while :; do sleep 1; done")).await;
        let filler = root.join("filler");
        fill(&filler);
        let create = async |name: &str| {
            let (pod_sandbox_id, config) = (sandbox.clone(), Some(container(name, "echo done; sleep 100")));
            let request = cri::CreateContainerRequest { pod_sandbox_id, config, sandbox_config: None };
            daemon.calls.rpc.clone().create_container(request).await
        };
        let refused = create("c").await.expect_err("no room");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused:?}");
        assert_eq!(names(&root.join("containers")), std::slice::from_ref(&before));
        assert_eq!(names(&root.join("snap")), std::slice::from_ref(&before));
        assert_eq!(daemon.exec(&before, "echo on").await, ("on\n".to_owned(), 0), "what runs goes on");
        let other = cri::RunPodSandboxRequest { config: Some(pod(place.path(), "b")), runtime_handler: String::new() };
        let refused = daemon.calls.rpc.clone().run_pod_sandbox(other.clone()).await.expect_err("no room");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused:?}");
        assert_eq!(names(&root.join("sandboxes")), std::slice::from_ref(&sandbox));
        fs::remove_file(&filler).expect("removed");
        let id = create("c").await.expect("there is room again").into_inner().container_id;
        let request = cri::StartContainerRequest { container_id: id };
        daemon.calls.rpc.clone().start_container(request).await.expect("starts");
        let second = daemon.calls.rpc.clone().run_pod_sandbox(other).await.expect("runs").into_inner().pod_sandbox_id;
        for sandbox in [&sandbox, &second] {
            daemon.remove(sandbox).await;
        }
        let of_disk = format!("small {} ", root.display());
        let left: Vec<_> = left(place.path()).into_iter().filter(|line| !line.starts_with(&of_disk)).collect();
        assert_eq!(left, Vec::<String>::new());
        daemon.stop.cancel();
    });
}

/// A container fills the runtime's disk; stopping and removing its pod needs no space, and frees all of it.
fn filled_by_a_container(test: &str, options: &'static str, script: &'static str) {
    in_network_namespace(test, async move |place| {
        let root = place.path().join("root");
        fs::create_dir(&root).expect("made");
        mount(Some("small"), &root, Some("tmpfs"), MsFlags::empty(), Some(options)).expect("mounted");
        let daemon = daemon(place.path()).await;
        let used = || {
            let disk = nix::sys::statvfs::statvfs(&root).expect("there");
            (disk.blocks() - disk.blocks_free(), disk.files() - disk.files_free())
        };
        let before = used();
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let id = daemon.start(&sandbox, container("c", script)).await;
        let log = daemon.status(&id).await.log_path;
        let begun = Instant::now();
        while !fs::read_to_string(&log).is_ok_and(|text| text.contains("stdout F full")) {
            assert!(begun.elapsed() < LIMIT, "the disk does not get full");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Whatever space the container left: not a byte remains.
        fill(&root.join("filler"));
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() };
        daemon.calls.rpc.clone().stop_pod_sandbox(stop).await.expect("stops on a full disk");
        daemon.remove(&sandbox).await;
        let _ = fs::remove_file(root.join("filler")); // without a free inode it was not created
        assert_eq!((names(&root.join("containers")), names(&root.join("snap"))), (Vec::new(), Vec::new()));
        assert_eq!(used(), before);
        let again = daemon.run(pod(place.path(), "b")).await;
        daemon.remove(&again).await;
        daemon.stop.cancel();
    });
}

#[test]
fn a_pod_that_filled_the_disk_is_stopped_and_removed() {
    let script = "head -c 64m /dev/zero > /tmp/big 2> /dev/null; echo full; while :; do sleep 1; done";
    filled_by_a_container("a_pod_that_filled_the_disk_is_stopped_and_removed", "size=48m", script);
}

#[test]
fn a_pod_that_took_all_inodes_is_stopped_and_removed() {
    let script = "i=0; while true 2> /dev/null > /tmp/$i; do i=$((i+1)); done; echo full; while :; do sleep 1; done";
    filled_by_a_container("a_pod_that_took_all_inodes_is_stopped_and_removed", "size=48m,nr_inodes=3000", script);
}
