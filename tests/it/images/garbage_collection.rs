//! Image garbage collection, and the image list of the node status.

use std::{sync::Arc, time::Duration};

use berth::images::{DiskSpace, GcPolicy};
use berth_cri::RuntimeService;
use berth_proto::cri;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::images::fixture::{FixtureOptions, ImageManagerFixture, secs, simple};
use berth_testkit::{
    clock::TokioClock,
    scripted_cri::{Fault, ScriptedCri},
};

fn start(room: &ImageManagerFixture) -> CancellationToken {
    let (manager, stop) = (room.manager.clone(), CancellationToken::new());
    let token = stop.clone();
    tokio::spawn(async move { manager.run(token).await });
    stop
}

fn set_available(room: &ImageManagerFixture, available: u64) {
    *room.space.lock().expect("lock") = DiskSpace { capacity: 1000, available };
}

/// A fixture with the given sizes only: `busybox:1` is pinned out of the way.
async fn room(gc: GcPolicy) -> ImageManagerFixture {
    let room = ImageManagerFixture::with(FixtureOptions { gc, ..FixtureOptions::default() }).await;
    put(&room, "docker.io/library/busybox:1", 1, true);
    room
}

fn put(room: &ImageManagerFixture, tag: &str, size: u64, pinned: bool) -> String {
    let id = room.cri.add_image(tag, size);
    let image = cri::Image { id: id.clone(), repo_tags: vec![tag.into()], size, pinned, ..Default::default() };
    room.cri.put_image(image);
    id
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn the_old_go_when_the_disk_is_full() {
    // AC-03b-20
    let room = room(GcPolicy::default()).await;
    let old = put(&room, "r.io/old:1", 80, false);
    start(&room);
    sleep(4 * MINUTE).await;
    set_available(&room, 100);
    put(&room, "r.io/young:1", 80, false);
    sleep(20 * SECOND).await;
    assert_eq!(room.cri.targets("remove_image"), [old]);
    assert_eq!(
        room.events(),
        ["node Warning FreeDiskSpaceFailed: Insufficient free disk space on the node's image filesystem (90% of \
          1000 B used). Failed to free sufficient space by deleting unused images (freed 80 bytes). Investigate disk \
          usage, as it could be used by active images, logs, volumes, or other data."]
    );
    assert_eq!(room.counter("kubelet_image_garbage_collected_total", &[("reason", "space")]), 1.0);
    sleep(5 * MINUTE).await;
    let events = room.events();
    assert!(
        events.iter().any(|e| e.starts_with("node Warning ImageGCFailed: Insufficient free disk space")),
        "{events:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_image_without_an_id_is_reported_and_kept() {
    // Spec 05 §13
    let room = room(GcPolicy::default()).await;
    let nameless = cri::Image { repo_tags: vec!["r.io/odd:1".into()], size: 500, ..Default::default() };
    room.cri.put_image(nameless);
    let old = put(&room, "r.io/old:1", 80, false);
    start(&room);
    sleep(4 * MINUTE).await;
    set_available(&room, 100);
    sleep(20 * SECOND).await;
    assert_eq!(room.cri.targets("remove_image"), [old]);
    let events = room.events();
    let expected = "node Warning InvalidImageID: ImageID is not valid, skipping, image: r.io/odd:1";
    assert!(events.iter().any(|text| *text == expected), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fills_up_is_not_left_until_the_next_round() {
    let room = room(GcPolicy::default()).await;
    let old = put(&room, "r.io/old:1", 80, false);
    start(&room);
    sleep(3 * MINUTE).await;
    assert_eq!(room.cri.count("remove_image"), 0);
    set_available(&room, 149);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(room.cri.targets("remove_image"), [old]);
    // Still over the threshold: this triggers a collection, but not one every second.
    let lists_before = room.cri.count("list_containers");
    sleep(Duration::from_secs(28)).await;
    assert_eq!(room.cri.count("list_containers"), lists_before);
    sleep(2 * MINUTE).await;
    let rounds = room.cri.count("list_containers") - lists_before;
    assert!((3..=5).contains(&rounds), "{rounds}");
    // Below and above the threshold again: this triggers a collection, but not twice within the interval.
    set_available(&room, 500);
    sleep(MINUTE).await;
    let lists_before = room.cri.count("list_containers");
    for _ in 0..3 {
        set_available(&room, 100);
        sleep(Duration::from_secs(2)).await;
        set_available(&room, 500);
        sleep(Duration::from_secs(2)).await;
    }
    assert_eq!(room.cri.count("list_containers"), lists_before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_round_that_failed_does_not_put_off_the_next() {
    let room = room(GcPolicy::default()).await;
    let old = put(&room, "r.io/old:1", 80, false);
    start(&room);
    sleep(3 * MINUTE).await;
    room.cri.fault("remove_image", "", Fault::Error(Code::Internal, "busy".into()), Some(1));
    set_available(&room, 149);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(room.cri.count("remove_image"), 1);
    sleep(Duration::from_secs(28)).await;
    assert_eq!(room.cri.count("remove_image"), 1, "not at once");
    sleep(Duration::from_secs(4)).await;
    assert_eq!(room.cri.targets("remove_image"), [old.clone(), old], "but not minutes later");
}

#[tokio::test(start_paused = true)]
async fn enough_is_enough() {
    let room = room(GcPolicy::default()).await;
    for tag in ["r.io/a:1", "r.io/b:1", "r.io/c:1"] {
        put(&room, tag, 60, false);
    }
    start(&room);
    sleep(4 * MINUTE).await;
    set_available(&room, 100);
    sleep(20 * SECOND).await;
    assert_eq!(room.cri.count("remove_image"), 2, "100 bytes were wanted");
    assert!(room.events().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_container_refers_to_stays() {
    // AC-03b-21, AC-03b-22
    let room = room(GcPolicy::default()).await;
    let unused = put(&room, "r.io/unused:1", 10, false);
    put(&room, "r.io/used:1", 10, false);
    put(&room, "r.io/pinned:1", 10, true);
    let meta = cri::PodSandboxMetadata { name: "p".into(), uid: "u".into(), namespace: "d".into(), attempt: 0 };
    let sandbox = cri::PodSandboxConfig { metadata: Some(meta), ..Default::default() };
    let id = room.cri.run_pod_sandbox(sandbox.clone(), "").await.expect("a sandbox");
    let config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: "r.io/used:1".into(), ..Default::default() }),
        ..Default::default()
    };
    let container = room.cri.create_container(&id, config, sandbox).await.expect("a container");
    room.cri.start_container(&container).await.expect("starts");
    room.cri.kill(&container, 1, "Error");
    start(&room);
    sleep(3 * MINUTE).await;
    assert_eq!(room.manager.delete_unused().await, Ok(10));
    assert_eq!(room.cri.targets("remove_image"), [unused]);
}

#[tokio::test(start_paused = true)]
async fn what_was_just_handed_out_stays() {
    let room = room(GcPolicy::default()).await;
    put(&room, "r.io/x:1", 10, false);
    start(&room);
    sleep(3 * MINUTE).await;
    room.ensure(simple("r.io/x:1")).await.expect("present");
    assert_eq!(room.manager.delete_unused().await, Ok(0), "its container is about to be created");
    sleep(6 * MINUTE).await;
    assert_eq!(room.manager.delete_unused().await, Ok(10), "no container came");
}

#[tokio::test(start_paused = true)]
async fn the_young_stay_even_for_eviction() {
    let room = room(GcPolicy::default()).await;
    start(&room);
    sleep(Duration::from_secs(1)).await;
    put(&room, "r.io/young:1", 10, false);
    assert_eq!(room.manager.delete_unused().await, Ok(0));
}

#[tokio::test(start_paused = true)]
async fn the_idle_go_by_age_even_after_a_restart() {
    let gc = GcPolicy { maximum_age: 30 * MINUTE, high_percent: 100, ..GcPolicy::default() };
    let first = room(gc).await;
    put(&first, "r.io/idle:1", 10, false);
    let stop = start(&first);
    sleep(20 * MINUTE).await;
    stop.cancel();
    let second = ImageManagerFixture::at(
        first.cri.clone(),
        first.clock.clone(),
        first.dir.clone(),
        FixtureOptions { gc, ..FixtureOptions::default() },
    )
    .await;
    start(&second);
    sleep(16 * MINUTE).await;
    assert_eq!(second.cri.count("remove_image"), 1, "ages hold across restarts");
    assert_eq!(second.counter("kubelet_image_garbage_collected_total", &[("reason", "age")]), 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_removal_does_not_stop_the_others() {
    let gc = GcPolicy { maximum_age: 3 * MINUTE, ..GcPolicy::default() };
    let room = room(gc).await;
    let (bad, good) = (put(&room, "r.io/bad:1", 10, false), put(&room, "r.io/good:1", 10, false));
    room.cri.fault("remove_image", &bad, Fault::Error(Code::Internal, "busy".into()), None);
    start(&room);
    sleep(11 * MINUTE).await;
    assert!(room.cri.targets("remove_image").contains(&good));
    let text = "node Warning ImageGCFailed: wanted to free images older than 3m0s, encountered errors in image \
                deletion: rpc error: code = Internal desc = busy";
    assert!(room.events().contains(&text.to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_filesystem_without_capacity() {
    let room = room(GcPolicy::default()).await;
    *room.space.lock().expect("lock") = DiskSpace { capacity: 0, available: 0 };
    start(&room);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(room.events(), ["node Warning InvalidDiskCapacity: invalid capacity 0 on image filesystem"]);
}

#[tokio::test(start_paused = true)]
async fn records_go_with_their_images_only() {
    let room = room(GcPolicy::default()).await;
    room.ensure(simple("r.io/a")).await.expect("pulled");
    room.ensure(simple("r.io/b")).await.expect("pulled");
    assert_eq!(room.files("pulled"), 2);
    start(&room);
    sleep(6 * MINUTE).await;
    assert_eq!(room.files("pulled"), 2, "unused, but still here");
    // Used six minutes ago and never by a container.
    room.manager.delete_unused().await.expect("freed");
    assert_eq!(room.files("pulled"), 0);
}

#[tokio::test(start_paused = true)]
async fn off_means_off_but_the_list_goes_on() {
    let gc = GcPolicy { high_percent: 100, ..GcPolicy::default() };
    let room = room(gc).await;
    set_available(&room, 0);
    put(&room, "r.io/big:1", 500, false);
    start(&room);
    let mut listed = room.manager.listed();
    listed.changed().await.expect("a list");
    let sizes: Vec<u64> = listed.borrow_and_update().iter().map(|image| image.size).collect();
    assert_eq!(sizes, [500, 1]);
    put(&room, "r.io/bigger:1", 900, false);
    tokio::time::timeout(secs(31), listed.changed()).await.expect("within 30 s").expect("a list");
    assert_eq!(listed.borrow().first().map(|image| image.size), Some(900));
    sleep(11 * MINUTE).await;
    assert_eq!(room.cri.count("remove_image"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_back_keeps_no_image() {
    let clock = Arc::new(TokioClock::new());
    let dir = Arc::new(tempfile::tempdir().expect("a directory"));
    let room =
        ImageManagerFixture::at(ScriptedCri::new(clock.clone()), clock.clone(), dir, FixtureOptions::default()).await;
    put(&room, "docker.io/library/busybox:1", 1, true);
    let old = put(&room, "r.io/old:1", 80, false);
    put(&room, "r.io/used:1", 80, false);
    start(&room);
    sleep(6 * MINUTE).await;
    room.ensure(simple("r.io/used:1")).await.expect("present");
    clock.set(-24 * 3_600_000);
    // Ages restart: no image is older than the clock.
    assert_eq!(room.manager.delete_unused().await, Ok(0));
    sleep(3 * MINUTE).await;
    assert_eq!(room.manager.delete_unused().await, Ok(80), "what was handed out is still held");
    assert_eq!(room.cri.targets("remove_image"), [old]);
    sleep(3 * MINUTE).await;
    assert_eq!(room.manager.delete_unused().await, Ok(80), "and no longer than otherwise");
}

#[tokio::test(start_paused = true)]
async fn a_round_that_had_nothing_to_do_puts_off_nothing() {
    let room = room(GcPolicy::default()).await;
    let old = put(&room, "r.io/old:1", 80, false);
    start(&room);
    sleep(5 * MINUTE + SECOND).await;
    set_available(&room, 149);
    sleep(SECOND).await;
    assert_eq!(room.cri.targets("remove_image"), [old], "the last round was just before");
}

#[tokio::test(start_paused = true)]
async fn a_failed_first_round_is_retried_soon() {
    let room = room(GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() }).await;
    let old = put(&room, "r.io/old:1", 80, false);
    room.cri.fault("list_containers", "", Fault::Error(Code::Unavailable, "not yet".into()), Some(1));
    set_available(&room, 149);
    start(&room);
    sleep(29 * SECOND).await;
    assert_eq!(room.cri.count("remove_image"), 0, "not at once");
    sleep(3 * SECOND).await;
    assert_eq!(room.cri.targets("remove_image"), [old], "but not minutes later");
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_stays_full_is_reported_periodically() {
    let room = room(GcPolicy::default()).await;
    set_available(&room, 100);
    start(&room);
    sleep(4 * MINUTE + 50 * SECOND).await;
    let count = |events: &[String], reason: &str| events.iter().filter(|text| text.contains(reason)).count();
    let events = room.events();
    assert_eq!((count(&events, "FreeDiskSpaceFailed"), count(&events, "ImageGCFailed")), (1, 1), "{events:?}");
    sleep(10 * MINUTE).await;
    let events = room.events();
    assert_eq!((count(&events, "FreeDiskSpaceFailed"), count(&events, "ImageGCFailed")), (2, 2), "{events:?}");
    set_available(&room, 50);
    sleep(MINUTE).await;
    assert_eq!(count(&room.events(), "FreeDiskSpaceFailed"), 1, "that is news");
}

#[tokio::test(start_paused = true)]
async fn all_there_is_is_named_as_the_most_there_can_be() {
    let room = room(GcPolicy::default()).await;
    put(&room, "r.io/old:1", 80, false);
    start(&room);
    sleep(4 * MINUTE).await;
    room.cri.fault("remove_image", "", Fault::Error(Code::Internal, "busy".into()), Some(1));
    let error = room.manager.delete_unused().await.expect_err("it cannot be removed").to_string();
    assert!(error.starts_with("wanted to free 9223372036854775807 bytes, but freed 0 bytes space"), "{error}");
}
