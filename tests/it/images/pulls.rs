//! Image pulls: policies, credentials, back-off, parallelism, and deduplication.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use berth::images::{Parallelism, PullMoment};
use berth_ports::{EnsureImage, ImageProvider, ImageUser, PullPolicy};
use berth_proto::cri;
use tokio::time::{Instant, advance};
use tonic::Code;

use crate::images::fixture::{FixtureOptions, ImageManagerFixture, request, secret, secs, simple};
use berth_testkit::{pods, scripted_cri::Fault};

#[tokio::test(start_paused = true)]
async fn an_absent_image_is_pulled() {
    // AC-03b-1
    let room = ImageManagerFixture::new().await;
    room.cri.latency("pull_image", Duration::from_micros(1_234_567));
    let resolved = room.ensure(simple("busybox")).await.expect("pulled");
    assert_eq!(room.cri.targets("pull_image"), ["busybox:latest"]);
    assert!(resolved.reference.starts_with("sha256:"), "{resolved:?}");
    assert_eq!(
        room.events(),
        [
            "Normal Pulling: Pulling image \"busybox\"",
            "Normal Pulled: Successfully pulled image \"busybox\" in 1.235s (1.235s including waiting). Image size: 1000000 bytes."
        ]
    );
    let labels = [("pull_policy", "ifnotpresent"), ("present_locally", "false"), ("pull_required", "true")];
    assert_eq!(room.counter("kubelet_image_manager_ensure_image_requests_total", &labels), 1.0);
    assert_eq!(*room.pulls.lock().expect("lock"), [PullMoment::Began, PullMoment::Ended]);
}

#[tokio::test(start_paused = true)]
async fn a_digest_stays_as_it_is() {
    // AC-03b-2
    let room = ImageManagerFixture::new().await;
    let image = format!("busybox@sha256:{}", "a1".repeat(32));
    let _ = room.ensure(simple(&image)).await;
    assert_eq!(room.cri.targets("pull_image"), [image]);
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_none() {
    // AC-03b-3
    let room = ImageManagerFixture::new().await;
    let error = room.ensure(simple("BusyBox")).await.expect_err("no name");
    let text = "Failed to apply default image tag \"BusyBox\": couldn't parse image name \"BusyBox\": invalid \
                reference format: repository name (library/BusyBox) must be lowercase";
    assert_eq!((error.reason, error.message.as_str()), ("InvalidImageName", text));
    assert_eq!(room.events(), [format!("Warning InspectFailed: {text}")]);
    let labels = [("present_locally", "unknown"), ("pull_required", "unknown")];
    assert_eq!(room.counter("kubelet_image_manager_ensure_image_requests_total", &labels), 1.0);
}

#[tokio::test(start_paused = true)]
async fn never_means_never() {
    // AC-03b-4
    let room = ImageManagerFixture::new().await;
    let error = room.ensure(EnsureImage { policy: PullPolicy::Never, ..simple("r.io/x") }).await.expect_err("absent");
    let text = "Container image \"r.io/x\" is not present with pull policy of Never";
    assert_eq!((error.reason, error.message.as_str()), ("ErrImageNeverPull", text));
    assert_eq!(room.events(), [format!("Warning ErrImageNeverPull: {text}")]);
    assert_eq!(room.cri.count("pull_image"), 0);
}

#[tokio::test(start_paused = true)]
async fn always_pulls_what_is_here() {
    let room = ImageManagerFixture::new().await;
    room.ensure(EnsureImage { policy: PullPolicy::Always, ..simple("busybox:1") }).await.expect("pulled");
    assert_eq!(room.cri.count("pull_image"), 1);
    let labels = [("pull_policy", "always"), ("present_locally", "unknown"), ("pull_required", "true")];
    assert_eq!(room.counter("kubelet_image_manager_ensure_image_requests_total", &labels), 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_image_status_is_an_inspect_error() {
    let room = ImageManagerFixture::new().await;
    room.cri.fault("image_status", "", Fault::Error(Code::Internal, "broken".into()), None);
    let error = room.ensure(simple("busybox:1")).await.expect_err("unknown");
    assert_eq!(error.reason, "ImageInspectError");
    let text = "Failed to inspect image \"busybox:1\": rpc error: code = Internal desc = broken";
    assert_eq!(room.events(), [format!("Warning InspectFailed: {text}")]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_pull_is_backed_off() {
    // AC-03b-5
    let room = ImageManagerFixture::new().await;
    room.pulls_fail("r.io/x", None);
    let first = room.ensure(simple("r.io/x")).await.expect_err("fails");
    let words = "rpc error: code = NotFound desc = failed to pull r.io/x";
    assert_eq!((first.reason, first.message.as_str()), ("ErrImagePull", words));
    assert_eq!(first.retry_at, Some(Instant::now() + secs(3)), "to be shown as held back");
    let failed = format!("Warning Failed: Failed to pull image \"r.io/x\": {words}");
    assert_eq!(room.events(), ["Normal Pulling: Pulling image \"r.io/x\"".to_owned(), failed]);
    advance(secs(3)).await;
    let second = room.ensure(simple("r.io/x")).await.expect_err("held back");
    assert_eq!(second.reason, "ImagePullBackOff");
    assert_eq!(second.message, format!("Back-off pulling image \"r.io/x\": ErrImagePull: {words}"));
    assert_eq!(second.retry_at, Some(Instant::now() + secs(7)));
    assert_eq!(room.events(), ["Normal BackOff: Back-off pulling image \"r.io/x\""]);
    assert_eq!(room.cri.count("pull_image"), 1);
    assert_eq!(room.files("pulling"), 0, "no intent within the back-off");
}

#[tokio::test(start_paused = true)]
async fn steps_grow() {
    // AC-03b-6
    let room = ImageManagerFixture::new().await;
    room.pulls_fail("r.io/x", None);
    let mut attempts = Vec::new();
    let start = Instant::now();
    for second in 0..=70 {
        if room.ensure(simple("r.io/x")).await.expect_err("fails").reason == "ErrImagePull" {
            attempts.push(second);
        }
        tokio::time::sleep_until(start + secs(second + 1)).await;
    }
    assert_eq!(attempts, [0, 10, 30, 70]);
}

#[tokio::test(start_paused = true)]
async fn containers_of_a_pod_share_a_back_off() {
    // AC-03b-7
    let room = ImageManagerFixture::new().await;
    room.pulls_fail("r.io/x", None);
    let pod = pods::simple("web");
    let second = EnsureImage { field_path: Some("spec.containers{other}".into()), ..request(&pod, "r.io/x") };
    room.ensure(request(&pod, "r.io/x")).await.expect_err("fails");
    assert_eq!(room.ensure(second).await.expect_err("held back").reason, "ImagePullBackOff");
    let other = room.ensure(request(&pods::simple("db"), "r.io/x")).await.expect_err("fails too");
    assert_eq!(other.reason, "ErrImagePull", "another pod has its own");
    room.manager.forget(pod.uid());
    assert_eq!(room.ensure(request(&pod, "r.io/x")).await.expect_err("fails").reason, "ErrImagePull");
}

#[tokio::test(start_paused = true)]
async fn new_secrets_are_tried_at_once() {
    let room = ImageManagerFixture::new().await;
    room.pulls_fail("r.io/x", Some(1));
    let with = |user: &str| EnsureImage { secrets: Arc::from([secret("s", "r.io", user)]), ..simple("r.io/x") };
    room.ensure(with("old")).await.expect_err("refused");
    assert_eq!(room.ensure(with("old")).await.expect_err("held back").reason, "ImagePullBackOff");
    room.ensure(with("new")).await.expect("pulled");
    assert_eq!(room.pulled_as(), ["old", "new"]);
}

#[tokio::test(start_paused = true)]
async fn credentials_are_tried_in_turn() {
    // AC-03b-8
    let room = ImageManagerFixture::new().await;
    room.pulls_fail("r.io/x", Some(1));
    let secrets = Arc::from([secret("a", "r.io", "ada"), secret("b", "r.io", "bob")]);
    room.ensure(EnsureImage { secrets, ..simple("r.io/x") }).await.expect("the second works");
    assert_eq!(room.pulled_as(), ["ada", "bob"]);
}

#[tokio::test(start_paused = true)]
async fn wrong_credentials_are_not_dropped() {
    // AC-03b-9
    let room = ImageManagerFixture::new().await;
    room.pulls_fail("r.io/x", Some(1));
    let secrets = Arc::from([secret("a", "r.io", "ada")]);
    room.ensure(EnsureImage { secrets, ..simple("r.io/x") }).await.expect_err("refused");
    assert_eq!(room.pulled_as(), ["ada"], "no anonymous attempt");
}

#[tokio::test(start_paused = true)]
async fn without_a_secret_the_pull_is_anonymous() {
    // AC-03b-10: the engine reports the missing secret, the pull continues without it
    let room = ImageManagerFixture::new().await;
    room.ensure(simple("r.io/x")).await.expect("public");
    assert_eq!(room.pulled_as(), [""]);
}

#[tokio::test(start_paused = true)]
async fn docker_hub_s_old_key_counts() {
    // AC-03b-11
    let room = ImageManagerFixture::new().await;
    let secrets = Arc::from([secret("a", "https://index.docker.io/v1/", "ada")]);
    room.ensure(EnsureImage { secrets, ..simple("redis") }).await.expect("pulled");
    assert_eq!(room.pulled_as(), ["ada"]);
}

#[tokio::test(start_paused = true)]
async fn a_malformed_secret_ends_the_request() {
    // AC-03b-12
    let room = ImageManagerFixture::new().await;
    let mut bad = secret("a", "r.io", "ada");
    bad.data = br#"{"auths":{"r.io":{"auth":"dXNlcg=="}}}"#.to_vec();
    let error = room.ensure(EnsureImage { secrets: Arc::from([bad]), ..simple("r.io/x") }).await.expect_err("bad");
    assert_eq!(error.reason, "ErrImagePull");
    assert_eq!(error.message, "unable to parse auth field, must be formatted as base64(username:password)");
    assert_eq!(room.cri.count("pull_image"), 0);
}

#[tokio::test(start_paused = true)]
async fn the_node_s_configuration_comes_last() {
    let room = ImageManagerFixture::new().await;
    let config = String::from_utf8(secret("n", "r.io", "node").data).expect("text");
    std::fs::write(room.dir.path().join("config.json"), config).expect("written");
    room.pulls_fail("r.io/x", Some(1));
    let secrets = Arc::from([secret("a", "r.io", "ada")]);
    room.ensure(EnsureImage { secrets, ..simple("r.io/x") }).await.expect("the node's works");
    assert_eq!(room.pulled_as(), ["ada", "node"]);
}

#[tokio::test(start_paused = true)]
async fn a_present_image_never_waits_behind_a_pull() {
    let room =
        ImageManagerFixture::with(FixtureOptions { parallelism: Parallelism::Serial, ..FixtureOptions::default() })
            .await;
    room.cri.latency("pull_image", secs(1000));
    let manager = room.manager.clone();
    let pull = tokio::spawn(async move { manager.ensure(simple("r.io/big")).await });
    room.cri.until("the pull is under way", secs(1), |cri| cri.count("pull_image") == 1).await;
    let began = Instant::now();
    room.ensure(simple("busybox:1")).await.expect("present");
    assert_eq!(began.elapsed(), Duration::ZERO);
    pull.await.expect("ends").expect("pulled");
}

#[tokio::test(start_paused = true)]
async fn pulls_wait_for_their_turn() {
    let limit = NonZeroU32::new(2).expect("two");
    for (parallelism, ends) in [
        (Parallelism::Serial, [10, 20, 30, 40]),
        (Parallelism::Limited(limit), [10, 10, 20, 20]),
        (Parallelism::Unlimited, [10, 10, 10, 10]),
    ] {
        let room = ImageManagerFixture::with(FixtureOptions { parallelism, ..FixtureOptions::default() }).await;
        room.cri.latency("pull_image", secs(10));
        let start = Instant::now();
        let pulls = (0..4).map(|i| {
            let manager = room.manager.clone();
            async move {
                manager.ensure(simple(&format!("r.io/x{i}"))).await.expect("pulled");
                start.elapsed().as_secs()
            }
        });
        let mut ended = futures::future::join_all(pulls).await;
        ended.sort_unstable();
        assert_eq!(ended, ends, "{parallelism:?}");
        let events = room.events();
        let last = events.last().expect("events").clone();
        assert!(last.contains(&format!("in 10s ({}s including waiting)", ends[3])), "{last}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_same_pull_is_made_once() {
    let room = ImageManagerFixture::new().await;
    room.cri.latency("pull_image", secs(10));
    let (web, db) = (pods::simple("web"), pods::simple("db"));
    let (a, b) = tokio::join!(room.ensure(request(&web, "r.io/x")), room.ensure(request(&db, "r.io/x")));
    assert_eq!(a.expect("pulled"), b.expect("pulled"));
    assert_eq!(room.cri.count("pull_image"), 1);
    let secrets = Arc::from([secret("a", "r.io", "ada")]);
    let other = EnsureImage { secrets, policy: PullPolicy::Always, ..request(&web, "r.io/x") };
    let anonymous = EnsureImage { policy: PullPolicy::Always, ..request(&db, "r.io/x") };
    let (a, b) = tokio::join!(room.ensure(other), room.ensure(anonymous));
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(room.cri.count("pull_image"), 3, "other credentials are another pull");
}

#[tokio::test(start_paused = true)]
async fn a_pull_ends_with_its_last_waiter() {
    let room =
        ImageManagerFixture::with(FixtureOptions { parallelism: Parallelism::Serial, ..FixtureOptions::default() })
            .await;
    room.cri.fault("pull_image", "r.io/stuck", Fault::Hang, None);
    let (web, db) = (pods::simple("web"), pods::simple("db"));
    let stuck = |pod| {
        let (manager, request) = (room.manager.clone(), request(pod, "r.io/stuck"));
        tokio::spawn(async move { manager.ensure(request).await })
    };
    let (first, second) = (stuck(&web), stuck(&db));
    let mut waiters = 0;
    room.until("both wait for one pull", |room| {
        waiters += room.events().iter().filter(|event| event.starts_with("Normal Pulling")).count();
        waiters == 2 && room.cri.count("pull_image") == 1
    })
    .await;
    first.abort();
    assert!(tokio::time::timeout(secs(5), room.ensure(simple("r.io/next"))).await.is_err(), "still its turn");
    second.abort();
    room.ensure(simple("r.io/next")).await.expect("its turn has come");
    room.until("the intent of the pull that was cut short is deleted", |room| room.files("pulling") == 0).await;
}

#[tokio::test(start_paused = true)]
async fn too_many_pulls_at_once_are_refused() {
    let room = ImageManagerFixture::with(FixtureOptions { qps: (1, 2), ..FixtureOptions::default() }).await;
    for image in ["r.io/a", "r.io/b"] {
        room.ensure(simple(image)).await.expect("within the burst");
    }
    let error = room.ensure(simple("r.io/c")).await.expect_err("refused");
    assert_eq!((error.reason, error.message.as_str()), ("ErrImagePull", "pull QPS exceeded"));
    assert!(error.retry_at.is_some(), "it counts as a failure");
    advance(secs(1)).await;
    room.ensure(simple("r.io/d")).await.expect("a token has come back");
}

#[tokio::test(start_paused = true)]
async fn the_user_comes_from_the_image() {
    let room = ImageManagerFixture::new().await;
    let image = |id: &str, uid: Option<i64>, username: &str| cri::Image {
        id: id.into(),
        repo_tags: vec![format!("r.io/{id}:latest")],
        size: 1,
        uid: uid.map(|value| cri::Int64Value { value }),
        username: username.into(),
        ..Default::default()
    };
    room.cri.put_image(image("uid", Some(7), ""));
    room.cri.put_image(image("name", None, "app"));
    room.cri.put_image(image("none", None, ""));
    for (name, user) in
        [("uid", ImageUser::Uid(7)), ("name", ImageUser::Name("app".into())), ("none", ImageUser::Unset)]
    {
        let resolved = room.ensure(simple(&format!("r.io/{name}"))).await.expect("present");
        assert_eq!((resolved.reference.as_str(), resolved.user), (name, user));
    }
}
