//! CSI drivers that fail, hang, crash, and lie, and agents that stop in the middle of a call.
//!
//! Spec 07 §2.4, §6, §17.

use std::{fs, sync::Arc, time::Duration};

use berth_proto::csi;
use berth_volumes::{AttachableVolumePlugin, Class, FoundVolume, Mode, Usage};
use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use serde_json::json;
use tokio::net::UnixListener;
use tonic::Code;

use crate::csi::{DATA, DRIVER, Fixture, mount, removal, staged, uid, unmount};
use berth_testkit::{
    csi::{Fault, Plugin},
    process::skips,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_without_an_end_can_be_undone() {
    // AC-07-17
    if skips("a_stage_without_an_end_can_be_undone") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    for code in [Code::DeadlineExceeded, Code::Unavailable, Code::Aborted, Code::Cancelled, Code::ResourceExhausted] {
        driver.fail("NodeStageVolume", 1, Fault::ErrorAfter(code, "late"));
        let error = world.csi.stage(&usage).await.expect_err("no end");
        assert_eq!(error.class, Class::Uncertain, "{code:?}");
        assert_eq!(world.mounts().len(), 1, "it was done after all");
        let before = driver.of("NodeUnstageVolume").len();
        world.csi.unstage(&staged(&usage)).await.expect("undone");
        assert_eq!(driver.of("NodeUnstageVolume").len(), before + 1);
        assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stage_that_was_refused_leaves_nothing() {
    // AC-07-18
    if skips("a_stage_that_was_refused_leaves_nothing") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    driver.fail("NodeStageVolume", 2, Fault::Refuse(Code::InvalidArgument, "no such thing"));
    let error = world.csi.stage(&usage).await.expect_err("refused");
    assert_eq!(error.class, Class::Final);
    assert_eq!(error.text, "rpc error: code = InvalidArgument desc = no such thing");
    assert_eq!(world.left(), Vec::<std::path::PathBuf>::new());
    world.csi.unstage(&staged(&usage)).await.expect("nothing to do");
    assert_eq!(driver.mutating_calls(), ["NodeStageVolume"], "a refused stage is not unstaged");
    // Volumes reconstructed after an agent restart stay, whatever the driver returns.
    let rebuilt = Usage { was_rebuilt: true, ..usage.clone() };
    world.csi.stage(&rebuilt).await.expect_err("refused");
    assert_eq!(world.left().len(), 2, "{:?}", world.left());
    unmount(&world.csi, &usage).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publish_that_was_refused_leaves_what_the_pod_had() {
    // AC-07-19
    if skips("a_publish_that_was_refused_leaves_what_the_pod_had") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    fs::write(driver.volume("h").join("file"), DATA).expect("written");
    let usage = world.usage("p", json!({}));
    world.csi.stage(&usage).await.expect("staged");
    driver.fail("NodePublishVolume", 1, Fault::Refuse(Code::Internal, "no"));
    world.csi.publish(&usage).await.expect_err("refused");
    assert!(!usage.target.exists(), "nothing is left of the first attempt");
    let path = mount(&world.csi, &usage).await;
    driver.fail("NodePublishVolume", 2, Fault::Refuse(Code::Internal, "no"));
    for again in [Usage { is_republish: true, ..usage.clone() }, Usage { was_rebuilt: true, ..usage.clone() }] {
        let error = world.csi.publish(&again).await.expect_err("refused");
        assert_eq!(error.class, Class::Final);
        assert_eq!(fs::read_to_string(path.join("file")).expect("still there"), DATA);
        assert!(usage.target.join("vol_data.json").exists());
    }
    unmount(&world.csi, &usage).await;
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_dies_in_a_call_may_have_done_it() {
    if skips("a_driver_that_dies_in_a_call_may_have_done_it") {
        return;
    }
    let (world, mut driver, plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    for (method, calls) in
        [("NodeStageVolume", 1), ("NodePublishVolume", 2), ("NodeUnpublishVolume", 3), ("NodeUnstageVolume", 4)]
    {
        driver.fail(method, 1, Fault::DieAfter);
        let result = match calls {
            1 => world.csi.stage(&usage).await.map(drop),
            2 => world.csi.publish(&usage).await.map(drop),
            3 => world.csi.unpublish(&removal(&usage)).await,
            _ => world.csi.unstage(&staged(&usage)).await,
        };
        let error = result.expect_err("the connection is lost");
        assert_eq!(error.class, Class::Uncertain, "{method}: {error}");
        driver.die().await;
        driver.serve().await;
        // The registration stays valid: the channel reconnects to the new process.
        let retry = async || match calls {
            1 => world.csi.stage(&usage).await.map(drop),
            2 => world.csi.publish(&usage).await.map(drop),
            3 => world.csi.unpublish(&removal(&usage)).await,
            _ => world.csi.unstage(&staged(&usage)).await,
        };
        let until = async {
            while retry().await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), until).await.expect("it is back");
    }
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
    drop(plugin);
}

/// Sends these two response messages for each call, and nothing else.
async fn answer_twice(listener: UnixListener, answers: fn(&str) -> [Bytes; 2]) {
    loop {
        let (stream, _) = listener.accept().await.expect("accepted");
        tokio::spawn(async move {
            let mut connection = h2::server::handshake(stream).await.expect("HTTP/2");
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                let head = http::Response::builder().header("content-type", "application/grpc").body(());
                let mut stream = respond.send_response(head.expect("a head"), false).expect("answered");
                for message in answers(request.uri().path()) {
                    let mut frame = BytesMut::with_capacity(5 + message.len());
                    frame.put_u8(0);
                    frame.put_u32(u32::try_from(message.len()).expect("short"));
                    frame.put(message);
                    stream.send_data(frame.freeze(), false).expect("answered");
                }
                let trailers = http::HeaderMap::from_iter([(
                    "grpc-status".parse().expect("a name"),
                    "0".parse().expect("a value"),
                )]);
                stream.send_trailers(trailers).expect("answered");
            }
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_first_of_two_responses_counts() {
    if skips("only_the_first_of_two_responses_counts") {
        return;
    }
    let world = Fixture::open();
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    world.watch();
    let endpoint = world.root.join("twice.sock");
    // The second response differs: another node id, no capabilities.
    let serving = tokio::spawn(answer_twice(UnixListener::bind(&endpoint).expect("a socket"), |path| {
        let none = Bytes::new();
        match path.rsplit('/').next() {
            Some("NodeGetInfo") => ["first", "second"].map(|id| {
                let response = csi::NodeGetInfoResponse { node_id: id.to_owned(), ..Default::default() };
                response.encode_to_vec().into()
            }),
            Some("NodeGetCapabilities") => {
                let rpc = csi::node_service_capability::Rpc {
                    r#type: csi::node_service_capability::rpc::Type::StageUnstageVolume.into(),
                };
                let r#type = Some(csi::node_service_capability::Type::Rpc(rpc));
                let capabilities = vec![csi::NodeServiceCapability { r#type }];
                [csi::NodeGetCapabilitiesResponse { capabilities }.encode_to_vec().into(), none]
            }
            // An unknown field.
            _ => [none, Bytes::from_static(b"\x78\x01")],
        }
    }));
    let plugin = Plugin::csi(&world.socket(DRIVER), DRIVER, &endpoint, &["1.0.0"]);
    plugin.registered().await;
    let on_node = world.objects.on_node(DRIVER).expect("received");
    assert_eq!(on_node.node_id, "first");
    // All on one connection, which must survive a surplus response.
    let usage = world.usage("p", json!({}));
    for _ in 0..3 {
        mount(&world.csi, &usage).await;
        assert_eq!(world.left().len(), 3, "two records and where it is staged: {:?}", world.left());
        unmount(&world.csi, &usage).await;
        assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
    }
    serving.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_hangs_holds_up_its_call_only() {
    if skips("a_driver_that_hangs_holds_up_its_call_only") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let (usage, other) = (world.usage("p", json!({})), world.usage("q", json!({"csi": {"volumeHandle": "other"}})));
    driver.fail("NodeStageVolume", 1, Fault::Hang);
    let world = Arc::new(world);
    let (hanging, slow) = (world.clone(), usage.clone());
    let staging = tokio::spawn(async move { hanging.csi.stage(&slow).await });
    driver.until("hangs", |driver| driver.mutating_calls().len() == 1).await;
    mount(&world.csi, &other).await;
    unmount(&world.csi, &other).await;
    assert!(!staging.is_finished());
    driver.release();
    staging.await.expect("ended").expect("staged");
    world.csi.publish(&usage).await.expect("published");
    unmount(&world.csi, &usage).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_driver_a_volume_waits() {
    if skips("without_its_driver_a_volume_waits") {
        return;
    }
    let (world, driver, plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    mount(&world.csi, &usage).await;
    let mut cured = world.csi.recovered();
    drop(plugin);
    while world.drivers.get(DRIVER).is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let text = format!("driver name {DRIVER} not found in the list of registered CSI drivers");
    for (result, begins) in [
        (world.csi.stage(&usage).await.map(drop), "attacher.MountDevice failed to create newCsiDriverClient: "),
        (world.csi.publish(&usage).await.map(drop), "mounter.SetUpAt failed to get CSI client: "),
        (world.csi.unpublish(&removal(&usage)).await, "Unmounter.TearDownAt failed to get CSI client: "),
        (world.csi.unstage(&staged(&usage)).await, "attacher.UnmountDevice failed to create newCsiDriverClient: "),
    ] {
        let error = result.expect_err("no driver");
        assert_eq!((error.class, error.text), (Class::Transient, format!("kubernetes.io/csi: {begins}{text}")));
    }
    assert_eq!(world.mounts().len(), 2, "nothing was touched");
    cured.mark_unchanged();
    let again = Plugin::csi(&world.socket(DRIVER), DRIVER, &driver.endpoint, &["1.0.0"]);
    cured.changed().await.expect("notified that the driver is back");
    again.registered().await;
    unmount(&world.csi, &usage).await;
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_were_lost_strand_nothing() {
    if skips("records_that_were_lost_strand_nothing") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    for damage in ["", "{", "{\"driverName\":\"\"}"] {
        mount(&world.csi, &usage).await;
        fs::write(usage.target.join("vol_data.json"), damage).expect("written");
        unmount(&world.csi, &usage).await;
        assert_eq!((world.mounts(), world.left()), (vec![], vec![]), "{damage:?}");
    }
    // The volume's owner is unknown: a mounted path stays, an unmounted one is removed.
    mount(&world.csi, &usage).await;
    fs::remove_file(usage.target.join("vol_data.json")).expect("removed");
    let found =
        FoundVolume { pod: uid("p"), name: "pv".to_owned(), mode: Mode::Filesystem, path: usage.target.clone() };
    world.csi.rebuild(&found).expect_err("mounted, and nobody knows what");
    nix::mount::umount(&usage.target.join("mount")).expect("unmounted");
    let rebuilt = world.csi.rebuild(&found).expect("nothing is mounted");
    let unknown = berth_volumes::Removal { spec: Arc::new(rebuilt.spec), ..removal(&usage) };
    world.csi.unpublish(&unknown).await.expect("finished");
    assert!(!usage.target.exists());
    world.csi.unstage(&staged(&usage)).await.expect("unstaged");
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
    assert_eq!(driver.of("NodeUnpublishVolume").len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_lies_about_unmounting_is_not_believed() {
    if skips("a_driver_that_lies_about_unmounting_is_not_believed") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    fs::write(driver.volume("h").join("file"), DATA).expect("written");
    let usage = world.usage("p", json!({}));
    let path = mount(&world.csi, &usage).await;
    driver.fail("NodeUnpublishVolume", 1, Fault::SucceedWithoutEffect);
    let error = world.csi.unpublish(&removal(&usage)).await.expect_err("it is mounted still");
    assert_eq!(error.class, Class::Uncertain);
    assert!(error.text.ends_with("/mount is still mounted"), "{error}");
    assert_eq!(fs::read_to_string(path.join("file")).expect("untouched"), DATA);
    assert!(usage.target.join("vol_data.json").exists());
    unmount(&world.csi, &usage).await;
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inline_volume_that_is_gone_already_is_gone() {
    if skips("an_inline_volume_that_is_gone_already_is_gone") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let spec =
        json!({"fsGroupPolicy": "File", "volumeLifecycleModes": ["Ephemeral", "Persistent"], "attachRequired": false});
    world.objects.driver(DRIVER, spec);
    let inline = world.inline("p", json!({"driver": DRIVER}));
    world.csi.publish(&inline).await.expect("published");
    driver.fail("NodeUnpublishVolume", 2, Fault::ErrorAfter(Code::NotFound, "no such volume"));
    world.csi.unpublish(&removal(&inline)).await.expect("gone is gone");
    assert_eq!(world.left(), Vec::<std::path::PathBuf>::new());
    let usage = world.usage("p", json!({}));
    mount(&world.csi, &usage).await;
    let error = world.csi.unpublish(&removal(&usage)).await.expect_err("a persistent one should be known");
    assert!(error.text.starts_with("kubernetes.io/csi: Unmounter.TearDownAt failed: rpc error: code = NotFound"));
    unmount(&world.csi, &usage).await;
}
