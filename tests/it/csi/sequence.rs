//! CSI call sequence of a volume, from NodeStageVolume to NodeUnstageVolume.
//!
//! Behavior: spec 07 §12.3-12.8.

use std::{fs, os::unix::fs::MetadataExt, time::Duration};

use berth_ports::VolumeCondition;
use berth_proto::csi::node_service_capability::rpc::Type as Capability;
use berth_types::PodUid;
use berth_volumes::{AttachableVolumePlugin, Class, ErrorCause, Expansion, FoundVolume, FsGroup, Mode, Usage};
use serde_json::{Value, json};

use crate::csi::{DATA, DRIVER, Fixture, mount, removal, staged, unmount};
use berth_testkit::csi::{DriverProperties, Plugin};
use berth_testkit::process::skips;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_is_staged_once_and_published_to_each_pod() {
    if skips("a_volume_is_staged_once_and_published_to_each_pod") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    fs::write(driver.volume("h").join("file"), DATA).expect("written");
    world.objects.secret("stage", "key", "s3cret");
    let usage = world.usage(
        "p",
        json!({"mountOptions": ["noatime"], "csi": {"fsType": "ext4",
        "volumeAttributes": {"a": "b"}, "nodeStageSecretRef": {"name": "stage", "namespace": "ns"}}}),
    );
    let other = world.usage("q", json!({}));
    let path = mount(&world.csi, &usage).await;
    assert_eq!(path, usage.target.join("mount"));
    assert_eq!(fs::read_to_string(path.join("file")).expect("readable"), DATA);
    world.csi.publish(&other).await.expect("published");

    let stage = &driver.of("NodeStageVolume")[0];
    let staging = stage.path.clone();
    assert!(staging.starts_with(world.root.join("plugins/kubernetes.io/csi").join(DRIVER)));
    let capability = json!({"mode": "SINGLE_NODE_WRITER", "fsType": "ext4", "flags": ["noatime"], "group": ""});
    assert_eq!(stage.rest["capability"], capability);
    assert_eq!((&stage.rest["secrets"], &stage.rest["volumeContext"]), (&json!({"key": "s3cret"}), &json!({"a": "b"})));
    let publish = &driver.of("NodePublishVolume")[0];
    assert_eq!(publish.rest["staging"], json!(staging.display().to_string()));
    assert_eq!((&publish.rest["readonly"], &publish.rest["secrets"]), (&json!(false), &json!({})));
    assert_eq!(driver.of("NodeGetCapabilities").len(), 1, "once per registration");

    let record = |directory: &std::path::Path| fs::read_to_string(directory.join("vol_data.json")).expect("a record");
    let staged_record = format!("{{\"driverName\":\"{DRIVER}\",\"volumeHandle\":\"h\"}}\n");
    assert_eq!(record(staging.parent().expect("a parent")), staged_record);
    let published: Value = serde_json::from_str(&record(&usage.target)).expect("JSON");
    assert_eq!(published["specVolID"], "pv");
    assert_eq!(published["volumeLifecycleMode"], "Persistent");
    assert_eq!(published.as_object().expect("an object").len(), 6);

    world.csi.unpublish(&removal(&usage)).await.expect("unpublished");
    assert!(fs::read_to_string(other.target.join("mount/file")).is_ok(), "the other pod has it still");
    unmount(&world.csi, &other).await;
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
    assert_eq!(fs::read_to_string(driver.volume("h").join("file")).expect("kept"), DATA);
    let acts = ["NodeStageVolume", "NodePublishVolume", "NodePublishVolume", "NodeUnpublishVolume"];
    assert_eq!(driver.mutating_calls()[..4], acts);
    assert_eq!(driver.mutating_calls()[4..], ["NodeUnpublishVolume", "NodeUnstageVolume"]);
    let series = world.registry.gather().into_iter().find(|f| f.name() == "csi_operations_seconds").expect("counted");
    let labels = |m: &prometheus::proto::Metric| m.get_label().iter().map(|l| l.value().to_owned()).collect::<Vec<_>>();
    let expected = [DRIVER, "OK", "/csi.v1.Node/NodeUnstageVolume", "false"];
    assert!(series.get_metric().iter().any(|m| labels(m) == expected));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_does_not_stage_leaves_no_directories() {
    if skips("a_driver_that_does_not_stage_leaves_no_directories") {
        return;
    }
    let world = Fixture::open();
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    let (driver, _plugin) =
        world.register(DriverProperties { capabilities: vec![], ..DriverProperties::of(DRIVER) }).await;
    let usage = world.usage("p", json!({}));
    mount(&world.csi, &usage).await;
    assert!(!world.root.join("plugins/kubernetes.io").exists());
    assert_eq!(driver.of("NodePublishVolume")[0].rest["staging"], "");
    unmount(&world.csi, &usage).await;
    assert_eq!(driver.mutating_calls(), ["NodePublishVolume", "NodeUnpublishVolume"]);
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pods_own_volume_needs_a_driver_that_takes_it() {
    if skips("a_pods_own_volume_needs_a_driver_that_takes_it") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let usage = world.inline(
        "p",
        json!({"driver": DRIVER, "readOnly": true,
        "nodePublishSecretRef": {"name": "publish"}, "volumeAttributes": {"a": "b"}}),
    );
    let error = world.csi.publish(&usage).await.expect_err("only persistent ones");
    assert_eq!(error.class, Class::Transient);
    assert!(error.text.ends_with(&format!(
        "volume mode \"Ephemeral\" not supported by driver {DRIVER} (only supports [\"Persistent\"])"
    )));
    let spec = json!({"attachRequired": false, "fsGroupPolicy": "File", "podInfoOnMount": true,
        "volumeLifecycleModes": ["Ephemeral"], "tokenRequests": [{"audience": ""}, {"audience": "vault"}]});
    world.objects.driver(DRIVER, spec.clone());
    let error = world.csi.publish(&usage).await.expect_err("no secret");
    assert_eq!(error.class, Class::Transient);
    assert!(error.text.contains("fetching NodePublishSecretRef ns/publish failed"), "{error}");
    world.objects.secret("publish", "key", "value");
    let traits = world.csi.describe(&usage.pod, &usage.spec).await.expect("described");
    assert!(!traits.is_shared() && !traits.attachable);
    let path = world.csi.publish(&usage).await.expect("published").path;
    assert!(fs::write(path.join("x"), "x").is_err(), "read-only");

    let call = &driver.of("NodePublishVolume")[0];
    assert!(call.volume.starts_with("csi-") && call.volume.len() == 68);
    assert_eq!((&call.rest["staging"], &call.rest["readonly"]), (&json!(""), &json!(true)));
    assert_eq!(call.rest["secrets"], json!({"key": "value"}));
    let context = &call.rest["volumeContext"];
    assert_eq!((&context["a"], &context["csi.storage.k8s.io/pod.name"]), (&json!("b"), &json!("p")));
    assert_eq!(context["csi.storage.k8s.io/ephemeral"], "true");
    let tokens = context["csi.storage.k8s.io/serviceAccount.tokens"].as_str().expect("tokens");
    let tokens: Value = serde_json::from_str(tokens).expect("JSON");
    assert_eq!(tokens["vault"]["token"], "token of p for vault");
    assert_eq!(tokens[""]["token"], "token of p for ");

    // Published again, with the tokens in the secrets as the driver requires now.
    let mut spec = spec;
    spec["serviceAccountTokenInSecrets"] = json!(true);
    world.objects.driver(DRIVER, spec);
    let again = berth_volumes::Usage { is_republish: true, ..usage.clone() };
    world.csi.publish(&again).await.expect("published again");
    let call = &driver.of("NodePublishVolume")[1];
    assert!(call.rest["volumeContext"].get("csi.storage.k8s.io/serviceAccount.tokens").is_none());
    assert!(call.rest["secrets"]["csi.storage.k8s.io/serviceAccount.tokens"].is_string());
    world.csi.unpublish(&removal(&usage)).await.expect("unpublished");
    assert_eq!((world.mounts(), world.left()), (vec![], vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_is_waited_for_and_its_words_passed_on() {
    if skips("an_attachment_is_waited_for_and_its_words_passed_on") {
        return;
    }
    let world = Fixture::open();
    let (driver, _plugin) = world.register(DriverProperties::of(DRIVER)).await;
    let usage = world.usage("p", json!({}));
    let traits = world.csi.describe(&usage.pod, &usage.spec).await.expect("described");
    assert!(traits.attachable && traits.stages && traits.expands, "no object says otherwise");
    assert_eq!(
        (traits.volume.as_str(), traits.label.as_str()),
        ("disk.example.com^h", "kubernetes.io/csi:disk.example.com")
    );
    // `printf hdisk.example.comn | sha256sum`
    let name = "csi-63a6b0792f16cceffa0b0689df65a4df7e1190d3ad60d6a1f76bd5a58dcdbe6f";
    let error = world.csi.attached(&usage).await.expect_err("there is none");
    assert_eq!(error.class, Class::Transient);
    assert_eq!(error.text, format!("volume h has GET error for volume attachment {name}: {name} not found"));
    world.objects.attachment(name, json!({"attached": false}));
    let error = world.csi.attached(&usage).await.expect_err("not yet");
    assert_eq!(error.text, format!("volume h is not attached for volume attachment {name}"));
    world.objects.attachment(name, json!({"attached": true, "attachmentMetadata": {"device": "sda"}}));
    world.csi.attached(&usage).await.expect("attached");
    mount(&world.csi, &usage).await;
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        assert_eq!(driver.of(method)[0].rest["publishContext"], json!({"device": "sda"}), "{method}");
    }
    unmount(&world.csi, &usage).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_group_is_set_by_who_should() {
    // AC-07-33
    if skips("the_group_is_set_by_who_should") {
        return;
    }
    let (world, driver, plugin) = Fixture::with_driver().await;
    fs::write(driver.volume("h").join("file"), DATA).expect("written");
    let gid =
        |world: &Fixture| fs::metadata(world.usage("p", json!({})).target.join("mount/file")).expect("there").gid();
    let mut usage = world.usage("p", json!({}));
    usage.group = Some(FsGroup { group: 2345, on_root_mismatch: false });
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "ReadWriteOnceWithFSType"}));
    mount(&world.csi, &usage).await;
    assert_eq!(gid(&world), 0, "no fsType, no chown");
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    world.csi.publish(&usage).await.expect("published");
    assert_eq!(gid(&world), 2345);
    unmount(&world.csi, &usage).await;

    // A driver with VOLUME_MOUNT_GROUP gets the group in the call.
    drop(plugin);
    driver.nature(|nature| nature.capabilities.push(Capability::VolumeMountGroup));
    drop(driver);
    let world = Fixture::open();
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    let mut nature = DriverProperties::of(DRIVER);
    nature.capabilities.push(Capability::VolumeMountGroup);
    let (driver, _plugin) = world.register(nature).await;
    fs::write(driver.volume("h").join("file"), DATA).expect("written");
    let mut usage = world.usage("p", json!({}));
    usage.group = Some(FsGroup { group: 2345, on_root_mismatch: false });
    mount(&world.csi, &usage).await;
    assert_eq!(gid(&world), 0);
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        assert_eq!(driver.of(method)[0].rest["capability"]["group"], "2345", "{method}");
    }
    unmount(&world.csi, &usage).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_are_expanded_by_drivers_that_can() {
    if skips("volumes_are_expanded_by_drivers_that_can") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    let path = mount(&world.csi, &usage).await;
    let expansion = Expansion { usage: usage.clone(), path: path.clone(), from: 1, to: 4096 };
    assert_eq!(world.csi.expand(&expansion).await.expect("expanded"), 4096);
    let call = &driver.of("NodeExpandVolume")[0];
    assert_eq!((&call.path, driver.size("h")), (&path, Some(4096)));
    assert!(call.rest["staging"].as_str().is_some_and(|staging| staging.ends_with("globalmount")));
    for (code, trouble) in [
        (tonic::Code::FailedPrecondition, ErrorCause::InUse),
        (tonic::Code::OutOfRange, ErrorCause::Infeasible),
        (tonic::Code::Internal, ErrorCause::Other),
    ] {
        driver.fail("NodeExpandVolume", 1, berth_testkit::csi::Fault::Refuse(code, "no"));
        let error = world.csi.expand(&expansion).await.expect_err("refused");
        assert_eq!((error.class, error.trouble), (Class::Final, trouble), "{code:?}");
    }
    unmount(&world.csi, &usage).await;

    let world = Fixture::open();
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    let (_driver, _plugin) =
        world.register(DriverProperties { capabilities: vec![], ..DriverProperties::of(DRIVER) }).await;
    let expansion = Expansion { usage: world.usage("p", json!({})), path, from: 1, to: 2 };
    assert_eq!(world.csi.expand(&expansion).await.expect_err("cannot").trouble, ErrorCause::Unsupported);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_takes_no_more_volumes_is_known_by_their_attachment() {
    // Spec 07 §5.1
    if skips("a_node_that_takes_no_more_volumes_is_known_by_their_attachment") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    let name = "csi-63a6b0792f16cceffa0b0689df65a4df7e1190d3ad60d6a1f76bd5a58dcdbe6f";
    let asked = driver.of("NodeGetInfo").len();
    assert!(!world.csi.is_over_limit(&usage).await, "there is no attachment");
    let refused = |code| json!({"attached": false, "attachError": {"message": "too many", "errorCode": code}});
    world.objects.attachment(name, refused(8));
    assert!(!world.csi.is_over_limit(&usage).await, "its driver does not say that this changes");
    world.objects.driver(DRIVER, json!({"nodeAllocatableUpdatePeriodSeconds": 600}));
    world.objects.attachment(name, refused(13));
    assert!(!world.csi.is_over_limit(&usage).await, "it failed for another reason");
    assert_eq!(driver.of("NodeGetInfo").len(), asked);
    world.objects.attachment(name, refused(8));
    assert!(world.csi.is_over_limit(&usage).await);
    assert_eq!(driver.of("NodeGetInfo").len(), asked + 1, "the volume limit is read again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_label_of_selinux_comes_with_the_mount() {
    // Spec 07 §11, §12.4 step 2.
    if skips("a_label_of_selinux_comes_with_the_mount") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let label = "system_u:object_r:container_file_t:s0:c1,c2".to_owned();
    let spec = json!({"mountOptions": ["noatime"]});
    let usage = Usage { label: Some(label.clone()), ..world.usage("p", spec.clone()) };
    world.csi.stage(&usage).await.expect("staged");
    let published = world.csi.publish(&usage).await.expect("published");
    assert!(!published.relabel, "all of it has the label");
    let flags = json!(["noatime", format!("context=\"{label}\"")]);
    for method in ["NodeStageVolume", "NodePublishVolume"] {
        assert_eq!(driver.of(method)[0].rest["capability"]["flags"], flags, "{method}");
    }
    // A new agent reconstructs the SELinux label of the mount.
    let found = FoundVolume {
        pod: usage.pod.uid().clone(),
        name: "pv".to_owned(),
        mode: Mode::Filesystem,
        path: usage.target.clone(),
    };
    assert_eq!(world.csi.rebuild(&found).expect("known").label, Some(label.clone()));
    let staged: Vec<_> = world.csi.staged().expect("known").into_iter().map(|(_, one)| one.label).collect();
    assert_eq!(staged, [Some(label)]);
    unmount(&world.csi, &usage).await;
    let plain = world.usage("p", spec);
    mount(&world.csi, &plain).await;
    assert_eq!(driver.of("NodePublishVolume")[1].rest["capability"]["flags"], json!(["noatime"]));
    assert_eq!(world.csi.rebuild(&found).expect("known").label, None);
    unmount(&world.csi, &plain).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_reports_the_volume_condition() {
    // Spec 07 §12.8
    if skips("a_driver_reports_the_volume_condition") {
        return;
    }
    let (world, driver, plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    let path = mount(&world.csi, &usage).await;
    driver.nature(|nature| nature.condition = Some((true, "a disk is broken".to_owned())));
    let stats = world.csi.fullness(&usage, &path).await.expect("received");
    assert_eq!(stats.condition, None, "a condition without the capability is ignored");
    unmount(&world.csi, &usage).await;
    drop(plugin);
    let gone = async {
        while world.drivers.get(DRIVER).is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.expect("the driver goes with its plugin");
    driver.nature(|nature| nature.capabilities.push(Capability::VolumeCondition));
    let again = Plugin::csi(&world.socket(DRIVER), DRIVER, &driver.endpoint, &["1.9.0"]);
    again.registered().await;
    let path = mount(&world.csi, &usage).await;
    for (is_abnormal, message) in [(true, "a disk is broken"), (false, "")] {
        driver.nature(|nature| nature.condition = Some((is_abnormal, message.to_owned())));
        let stats = world.csi.fullness(&usage, &path).await.expect("received");
        assert_eq!(stats.condition, Some(VolumeCondition { is_abnormal, message: message.to_owned() }));
        assert_eq!(stats.capacity, 1000);
    }
    driver.nature(|nature| nature.condition = None);
    let stats = world.csi.fullness(&usage, &path).await.expect("received");
    let well = VolumeCondition { is_abnormal: false, message: String::new() };
    assert_eq!(stats.condition, Some(well), "who can say and does not has nothing to complain of");
    unmount(&world.csi, &usage).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drivers_report_the_usage_of_their_volumes() {
    if skips("drivers_report_the_usage_of_their_volumes") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    let usage = world.usage("p", json!({}));
    let path = mount(&world.csi, &usage).await;
    let stats = world.csi.fullness(&usage, &path).await.expect("received");
    assert_eq!((stats.source.as_str(), stats.capacity, stats.available, stats.used), (DRIVER, 1000, 990, 10));
    assert_eq!((stats.inodes, stats.inodes_free, stats.inodes_used), (100, 90, 10));
    assert_eq!(driver.of("NodeGetVolumeStats")[0].path, path);
    unmount(&world.csi, &usage).await;

    let world = Fixture::open();
    world.objects.driver(DRIVER, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
    let (_driver, _plugin) =
        world.register(DriverProperties { capabilities: vec![], ..DriverProperties::of(DRIVER) }).await;
    let cannot = world.csi.fullness(&world.usage("p", json!({})), &path).await.expect_err("cannot");
    assert_eq!(cannot.trouble, ErrorCause::Unsupported);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_is_staged_and_published() {
    if skips("a_device_is_staged_and_published") {
        return;
    }
    let (world, driver, _plugin) = Fixture::with_driver().await;
    // A device that exists on every machine: it is bind-mounted, and nobody reads it.
    fs::write(driver.volume("h").join("device"), "/dev/null").expect("written");
    let usage = world.usage("p", json!({"volumeMode": "Block"}));
    assert_eq!(usage.mode, Mode::Block);
    let path = mount(&world.csi, &usage).await;
    let root = world.root.join("plugins/kubernetes.io/csi/volumeDevices");
    assert_eq!(path, root.join("publish/pv").join(usage.pod.uid().as_str()));
    let stage = &driver.of("NodeStageVolume")[0];
    assert_eq!((&stage.path, &stage.rest["capability"]["block"]), (&root.join("staging/pv"), &json!(true)));
    let text = fs::read_to_string(root.join("pv/data/vol_data.json")).expect("a record");
    let record: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((record["specVolID"].as_str(), record.as_object().map(serde_json::Map::len)), (Some("pv"), Some(5)));
    // A new agent reconstructs it from its record.
    let link = world.root.join("pods/uid-p/volumeDevices/kubernetes.io~csi/pv");
    let found = FoundVolume { pod: PodUid::from("uid-p"), name: "pv".to_owned(), mode: Mode::Block, path: link };
    let rebuilt = world.csi.rebuild(&found).expect("known");
    let mut removal = removal(&usage);
    removal.spec = std::sync::Arc::new(rebuilt.spec);
    world.csi.unpublish(&removal).await.expect("unpublished");
    removal.pod = None;
    world.csi.unstage(&removal).await.expect("unstaged");
    assert_eq!(
        driver.mutating_calls(),
        ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"]
    );
    assert_eq!(world.mounts(), Vec::<std::path::PathBuf>::new());
    assert!(!root.join("pv").exists() && !root.join("staging/pv").exists() && !root.join("publish/pv").exists());
    let _ = staged(&usage);
}
