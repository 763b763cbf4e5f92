//! A disk that is full while containers are made. Spec 09 §7 (AC-09-E10).

use std::{fs, io::Write, path::Path};

use berth::proto::cri;
use nix::mount::{MsFlags, mount};

use berth_testkit::embedded::{
    in_process::{container, daemon, pod},
    place::{left, on_a_machine},
    traces::names,
};

/// Fills a file system to the last byte.
fn fill(path: &Path) {
    let mut file = fs::File::create(path).expect("made");
    for size in [1 << 20, 4096, 1] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
}

#[test]
fn a_full_disk_leaves_nothing_half_made() {
    on_a_machine("a_full_disk_leaves_nothing_half_made", async |place| {
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
