//! The image manager on real runtimes: containerd and the embedded runtime.
//!
//! Needs root; reports where it is skipped.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use berth::images::{
    DockerFolders, GcPolicy, ImageManager, ImagesConfig, ImagesDeps, Parallelism, VerificationPolicy,
    statvfs_disk_space,
};
use berth_cri::{ImageService, probe};
use berth_metrics::Registry;
use berth_ports::{EnsureImage, EventRecord, EventSink, ImageProvider, PullPolicy, SystemClock};
use tokio_util::sync::CancellationToken;

use crate::images::fixture::simple;
use berth_testkit::{
    image::{BUSYBOX, Image},
    runtimes::TestRuntime,
};

struct Nowhere;

impl EventSink for Nowhere {
    fn record(&self, _: EventRecord) {}
}

berth_testkit::on_real_runtimes! {
    images_of_a_real_runtime
}

async fn images_of_a_real_runtime(on: TestRuntime) {
    let Some(below) = on.runtime().await else { return };
    below.import(&[Image { user: "1000", ..Image::busybox("r.invalid/unused:1") }]).await;
    let registry = Registry::new();
    let connection = below.connection(&registry);
    probe(&connection, &registry, Duration::ZERO).await.expect("a runtime for us");
    let deps = ImagesDeps {
        images: connection.images.clone(),
        runtime: connection.runtime.clone(),
        events: Arc::new(Nowhere),
        clock: Arc::new(SystemClock),
        registry,
        room: Arc::new(statvfs_disk_space),
        on_pull: Arc::new(|_, _| {}),
        accounts: None,
    };
    let root = below.dir().join("kubelet");
    let config = ImagesConfig {
        root: root.clone(),
        max_pods: 110,
        registry_qps: 5,
        registry_burst: 10,
        parallelism: Parallelism::Limited(NonZeroU32::new(4).expect("four")),
        verification: Some(VerificationPolicy::default()),
        handler_in_calls: false,
        docker: DockerFolders { root, working: None, home: None },
        plugins: None,
        gc: GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() },
    };
    let manager = ImageManager::new(deps, config).await.expect("opens");
    let stop = CancellationToken::new();
    let (running, token) = (manager.clone(), stop.clone());
    let run = tokio::spawn(async move { running.run(token).await });

    let never = EnsureImage { policy: PullPolicy::Never, ..simple("busybox:1") };
    let present = manager.ensure(never).await.expect("loaded by hand");
    assert!(present.reference.starts_with("sha256:"), "{present:?}");
    let error = manager.ensure(simple("127.0.0.1:1/x:1")).await.expect_err("nobody there");
    assert_eq!(error.reason, "ErrImagePull");
    assert!(error.message.contains("failed to pull and unpack image"), "{}", error.message);

    let mut listed = manager.listed();
    let found = listed.wait_for(|images| images.iter().any(|i| i.repo_tags.contains(&BUSYBOX.to_owned())));
    tokio::time::timeout(Duration::from_secs(10), found).await.expect("in time").expect("runs");
    manager.delete_unused().await.expect("frees");
    let left = connection.images.list_images().await.expect("lists");
    let tags: Vec<&String> = left.iter().flat_map(|image| &image.repo_tags).collect();
    assert!(!tags.iter().any(|tag| tag.contains("unused")), "{tags:?}");
    assert!(tags.contains(&&BUSYBOX.to_owned()), "handed out a moment ago: {tags:?}");
    stop.cancel();
    run.await.expect("ends");
}
