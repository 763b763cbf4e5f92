//! Image pull records: whether a pod may use an image that is already present.

use std::sync::Arc;

use berth_ports::{EnsureImage, PullPolicy, PullSecret};
use berth_types::Pod;

use crate::images::fixture::{FixtureOptions, ImageManagerFixture, request, secret, simple};
use berth_testkit::pods;

const CHECKS: &str = "kubelet_imagemanager_image_mustpull_checks_total";

fn with(pod: &Arc<Pod>, secrets: &[PullSecret]) -> EnsureImage {
    EnsureImage { secrets: Arc::from(secrets), ..request(pod, "r.io/x") }
}

/// A fixture in which pod `web` has pulled `r.io/x` with the secret `a`.
async fn pulled_with_a_secret() -> ImageManagerFixture {
    let room = ImageManagerFixture::new().await;
    room.ensure(with(&pods::simple("web"), &[secret("a", "r.io", "ada")])).await.expect("pulled");
    assert_eq!((room.files("pulled"), room.files("pulling")), (1, 0));
    room.events();
    room
}

#[tokio::test(start_paused = true)]
async fn who_has_no_secret_must_pull() {
    // AC-03b-15
    let room = pulled_with_a_secret().await;
    room.ensure(with(&pods::simple("db"), &[])).await.expect("the scripted registry is open");
    assert_eq!(room.pulled_as(), ["ada", ""]);
    assert_eq!(room.counter(CHECKS, &[("result", "mustAuthenticate")]), 1.0);
}

#[tokio::test(start_paused = true)]
async fn presence_does_not_leak() {
    // AC-03b-16
    let room = pulled_with_a_secret().await;
    let never = EnsureImage { policy: PullPolicy::Never, ..with(&pods::simple("db"), &[]) };
    let error = room.ensure(never).await.expect_err("not for this pod");
    assert_eq!(error.reason, "ErrImageNeverPull");
    assert_eq!(error.message, "Container image \"r.io/x\" is not present with pull policy of Never");
    assert_eq!(room.cri.count("pull_image"), 1);
}

#[tokio::test(start_paused = true)]
async fn the_same_login_counts_wherever_it_stands() {
    // AC-03b-17
    let room = pulled_with_a_secret().await;
    let db = pods::simple("db");
    room.ensure(with(&db, &[secret("b", "r.io", "ada")])).await.expect("allowed");
    assert_eq!(room.cri.count("pull_image"), 1);
    assert_eq!(
        room.events(),
        ["Normal Pulled: Container image \"r.io/x\" already present on machine and can be accessed by the pod"]
    );
    assert_eq!(room.counter(CHECKS, &[("result", "credentialRecordFound")]), 1.0);
    // The secret's coordinates are recorded: rotated credentials in the same secret are sufficient now.
    room.ensure(with(&db, &[secret("b", "r.io", "rotated")])).await.expect("allowed");
    assert_eq!(room.cri.count("pull_image"), 1);
    room.ensure(with(&db, &[secret("c", "r.io", "eve")])).await.expect("the scripted registry is open");
    assert_eq!(room.cri.count("pull_image"), 2, "a stranger must authenticate");
}

#[tokio::test(start_paused = true)]
async fn what_was_loaded_by_hand_is_for_everybody() {
    // AC-03b-18
    let room = ImageManagerFixture::new().await;
    room.ensure(simple("busybox:1")).await.expect("present");
    assert_eq!(room.cri.count("pull_image"), 0);
    assert_eq!(room.counter(CHECKS, &[("result", "credentialPolicyAllowed")]), 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_restart_between_pull_and_record() {
    // AC-03b-19
    let room = ImageManagerFixture::new().await;
    let id = room.cri.add_image("r.io/x:latest", 5);
    let intent =
        "{\"kind\":\"ImagePullIntent\",\"apiVersion\":\"kubelet.config.k8s.io/v1beta1\",\"image\":\"r.io/x\"}\n";
    let name = {
        use sha2::Digest;
        sha2::Sha256::digest("r.io/x").iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    std::fs::write(room.dir.path().join(format!("image_manager/pulling/sha256-{name}")), intent).expect("written");
    let again = room.restarted().await;
    assert_eq!((again.files("pulled"), again.files("pulling")), (1, 0));
    again.ensure(with(&pods::simple("web"), &[])).await.expect("the scripted registry is open");
    assert_eq!(again.cri.count("pull_image"), 1, "{id} had to be pulled");
    again.ensure(with(&pods::simple("db"), &[])).await.expect("public now");
    assert_eq!(again.cri.count("pull_image"), 1);
}

#[tokio::test(start_paused = true)]
async fn records_outlive_the_process() {
    let room = pulled_with_a_secret().await.restarted().await;
    room.ensure(with(&pods::simple("db"), &[secret("b", "r.io", "ada")])).await.expect("allowed");
    assert_eq!(room.cri.count("pull_image"), 1);
}

#[tokio::test(start_paused = true)]
async fn without_the_gate_presence_is_enough() {
    let room = ImageManagerFixture::with(FixtureOptions { verification: None, ..FixtureOptions::default() }).await;
    room.ensure(with(&pods::simple("web"), &[secret("a", "r.io", "ada")])).await.expect("pulled");
    room.events();
    room.ensure(with(&pods::simple("db"), &[])).await.expect("present");
    assert_eq!(room.events(), ["Normal Pulled: Container image \"r.io/x\" already present on machine"]);
    assert_eq!(room.files("pulled"), 0);
}
