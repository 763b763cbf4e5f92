//! CRI client against real runtimes: a private containerd, and the embedded runtime.
//!
//! Needs root; reports where it is skipped.

use std::time::Duration;

use berth_cri::{ImageService, RuntimeService, probe};
use berth_metrics::Registry;
use berth_proto::cri;
use futures::StreamExt;

use berth_testkit::{cri_calls, image::BUSYBOX, runtimes::TestRuntime};

berth_testkit::on_real_runtimes! {
    the_client_drives_a_real_runtime
}

async fn the_client_drives_a_real_runtime(on: TestRuntime) {
    let Some(below) = on.runtime().await else { return };
    let registry = Registry::new();
    let connection = below.connection(&registry);
    let info = probe(&connection, &registry, Duration::from_secs(20)).await.expect("a runtime for us");
    assert_eq!(&*info.name, if matches!(on, TestRuntime::Embedded(_)) { "berth" } else { "containerd" });
    let (runtime, images) = (&connection.runtime, &connection.images);
    runtime.status().await.expect("conditions");

    assert!(images.list_images().await.expect("lists").iter().any(|i| i.repo_tags.contains(&BUSYBOX.to_owned())));
    let spec = |name: &str| cri::ImageSpec { image: name.into(), ..Default::default() };
    assert!(images.image_status(spec("busybox:1")).await.expect("answers").is_some());
    assert_eq!(images.image_status(spec("r.invalid/x:1")).await, Ok(None));
    let text = images.pull_image(spec("127.0.0.1:1/x:1"), None, None).await.expect_err("nobody there").to_string();
    assert!(text.starts_with("failed to pull and unpack image"), "{text}");
    assert!(!images.image_fs_info().await.expect("answers").image_filesystems.is_empty());

    // containerd 1.6 does not have this call; then there are no events to check below.
    let events = match runtime.container_events().await {
        Ok(events) => Some(events),
        Err(error) => {
            assert!(error.is_unimplemented() && matches!(on, TestRuntime::Containerd(_)), "{error}");
            None
        }
    };
    let pod = below.pod("p");
    let id = runtime.run_pod_sandbox(pod.clone(), "").await.expect("a sandbox");
    let container = cri_calls::container("c", "exec sleep 1000", cri::NamespaceMode::Container);
    let made = runtime.create_container(&id, container, pod).await.expect("a container");
    runtime.start_container(&made).await.expect("starts");
    assert_eq!(runtime.list_containers(None).await.expect("lists").len(), 1);
    assert_eq!(runtime.list_pod_sandbox(None).await.expect("lists").len(), 1);
    let status = runtime.container_status(&made).await.expect("a status");
    assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
    runtime.pod_sandbox_status(&id).await.expect("a status");

    let exec = |script: &str, limit: u64| {
        let command = ["/bin/sh", "-c", script].map(str::to_owned);
        let (runtime, made) = (runtime.clone(), made.clone());
        async move { runtime.exec_sync(&made, &command, Duration::from_secs(limit), usize::MAX).await }
    };
    assert_eq!(exec("echo hi", 10).await.expect("exit 0").stdout, b"hi\n");
    let text = exec("echo no >&2; exit 3", 10).await.expect_err("exit 3").to_string();
    assert_eq!(text, "command '/bin/sh -c echo no >&2; exit 3' exited with 3: no\n");
    let text = exec("sleep 5", 1).await.expect_err("too slow").to_string();
    assert_eq!(text, "command timed out: \"/bin/sh -c sleep 5\" timed out after 1s");
    let missing = runtime.container_status("none").await.expect_err("unknown");
    assert!(missing.is_not_found(), "{missing}");

    runtime.stop_container(&made, Duration::from_secs(1)).await.expect("stops");
    runtime.stop_pod_sandbox(&id).await.expect("stops");
    runtime.remove_container(&made).await.expect("goes");
    runtime.remove_pod_sandbox(&id).await.expect("goes");
    if let Some(mut events) = events {
        let first = tokio::time::timeout(Duration::from_secs(10), events.next()).await.expect("an event in time");
        assert!(first.expect("the stream lives").is_ok());
    }
}
