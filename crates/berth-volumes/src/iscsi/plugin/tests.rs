//! The plugin on a fake host with scripted initiator, disks, and mounts.

use serde_json::{Value, json};

use super::*;
use crate::{
    machine::RunError,
    testing::{self, FakeMachine, FakeStorage, disk, session},
};

const IQN: &str = "iqn.x";

struct Bench {
    dir: tempfile::TempDir,
    fake: Arc<FakeMachine>,
    plugin: IscsiPlugin,
}

fn bench() -> Bench {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir(dir.path().join("k")).expect("made");
    let fake = FakeMachine::new();
    let plugin = IscsiPlugin::with_disks(
        &dir.path().join("k"),
        fake.clone(),
        ScsiDisks::below(&dir.path().join("m")),
        Arc::new(FakeStorage::default()),
    );
    fake.on("-o show", "iface.transport_name = tcp", || {});
    Bench { dir, fake, plugin }
}

fn spec(more: &Value) -> VolumeSpec {
    let mut volume = json!({"metadata": {"name": "pv"}, "spec": {"iscsi":
        {"targetPortal": "10.0.0.1", "iqn": IQN, "lun": 1}}});
    for (key, value) in more.as_object().expect("members") {
        match key.as_str() {
            "volumeMode" => volume["spec"]["volumeMode"] = value.clone(),
            _ => volume["spec"]["iscsi"][key] = value.clone(),
        }
    }
    VolumeSpec::persistent(Arc::new(serde_json::from_value(volume).expect("a volume")), Arc::default(), false)
}

impl Bench {
    fn usage(&self, more: &Value) -> Usage {
        testing::usage(&self.plugin.root, PLUGIN, spec(more))
    }

    fn machine(&self) -> PathBuf {
        self.dir.path().join("m")
    }

    /// Makes a login at this portal create a session and a disk.
    fn serves(&self, address: &'static str, host: u32, name: &'static str) {
        let root = self.machine();
        self.fake.on(&format!("-p {address}:3260 -T iqn.x -I default --login"), "", move || {
            session(&root, host, IQN, address, &[(1, name)]);
            disk(&root, name, &[&format!("by-path/ip-{address}:3260-iscsi-{IQN}-lun-1")]);
        });
    }

    fn shared(&self) -> PathBuf {
        self.plugin.root.join("plugins/kubernetes.io/iscsi/iface-default/10.0.0.1:3260-iqn.x-lun-1")
    }

    /// Number of calls that contain the words.
    fn asked(&self, words: &str) -> usize {
        self.fake.calls().iter().filter(|call| call.contains(words)).count()
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_is_logged_in_to_mounted_and_given_back() {
    let bench = bench();
    bench.serves("10.0.0.1", 3, "sdb");
    let usage = bench.usage(&json!({}));
    let traits = bench.plugin.describe(&usage.pod, &usage.spec).await.expect("described");
    assert_eq!((traits.volume.as_str(), traits.attachable, traits.stages), ("10.0.0.1:iqn.x:1", true, true));
    bench.fake.next("blkid", Ok((2, "")));
    bench.plugin.stage(&usage).await.expect("staged");
    let (shared, target) = (bench.shared(), usage.target.clone());
    let device = bench.machine().join("dev/disk/by-path/ip-10.0.0.1:3260-iscsi-iqn.x-lun-1");
    let (shared_text, device) = (shared.display(), device.display());
    let discovery = "iscsiadm -m discoverydb -t sendtargets -p 10.0.0.1:3260 -I default";
    let node = "iscsiadm -m node -p 10.0.0.1:3260 -T iqn.x";
    assert_eq!(
        bench.fake.calls(),
        [
            "iscsiadm -m iface -I default -o show".to_owned(),
            format!("{discovery} -o new"),
            format!("{discovery} --discover"),
            format!("{node} -I default -o update -n node.session.scan -v manual"),
            format!("{node} -I default --login"),
            format!("{node} -o update -n node.startup -v manual"),
            format!("blkid -p -s TYPE -s PTTYPE -o export {device}"),
            format!("mkfs.ext4 -F -m0 {device}"),
            format!("mount -t ext4 -o defaults {device} {shared_text}"),
        ]
    );
    let scan = fs::read_to_string(bench.machine().join("sys/class/scsi_host/host3/scan")).expect("there");
    assert_eq!(scan, "0 0 1");
    let published = bench.plugin.publish(&usage).await.expect("published");
    assert_eq!(published, PublishedVolume { path: target.clone(), relabel: true });
    assert_eq!(bench.fake.targets(), [shared_text.to_string(), target.display().to_string()]);

    // Rejected while a pod has the volume.
    let refused = bench.plugin.unstage(&testing::removal(&usage, false)).await.expect_err("in use");
    assert!(refused.text.contains("is still mounted by other references"), "{refused}");
    bench.plugin.unpublish(&testing::removal(&usage, true)).await.expect("unpublished");
    bench.fake.next("iscsiadm", Ok((21, "iscsiadm: No matching sessions found")));
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("logged out before: fine");
    let calls = bench.fake.calls();
    let last: Vec<&str> = calls.iter().rev().take(2).rev().map(String::as_str).collect();
    assert_eq!(last, [format!("{node} --logout -I default"), format!("{node} -o delete -I default")]);
    let gone = fs::read_to_string(bench.machine().join("sys/block/sdb/device/delete")).expect("there");
    assert_eq!(gone, "1");
    assert!(!shared.exists() && bench.fake.targets().is_empty() && bench.plugin.staged().expect("read").is_empty());
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("nothing there");
    assert_eq!(bench.fake.calls().len(), calls.len());
}

#[tokio::test(start_paused = true)]
async fn a_disk_is_mounted_with_its_label() {
    // Spec 07 §11.
    let bench = bench();
    bench.serves("10.0.0.1", 3, "sdb");
    let label = "u:object_r:container_file_t:s0:c1,c2".to_owned();
    let usage = Usage { label: Some(label.clone()), ..bench.usage(&json!({})) };
    assert!(bench.plugin.describe(&usage.pod, &usage.spec).await.expect("described").supports_mount_label);
    bench.fake.next("blkid", Ok((2, "")));
    bench.plugin.stage(&usage).await.expect("staged");
    assert_eq!(bench.asked(&format!("mount -t ext4 -o context=\"{label}\",defaults ")), 1, "{:?}", bench.fake.calls());
    let published = bench.plugin.publish(&usage).await.expect("published");
    assert!(!published.relabel, "all of it has the label");
    let found = FoundVolume {
        pod: usage.pod.uid().clone(),
        name: usage.spec.name.clone(),
        mode: Mode::Filesystem,
        path: usage.target.clone(),
    };
    assert_eq!(bench.plugin.rebuild(&found).expect("known").label, Some(label.clone()));
    let staged: Vec<_> = bench.plugin.staged().expect("known").into_iter().map(|(_, one)| one.label).collect();
    assert_eq!(staged, [Some(label)]);
}

#[tokio::test(start_paused = true)]
async fn ways_are_joined_and_a_missing_one_is_done_without() {
    let bench = bench();
    bench.serves("10.0.0.1", 3, "sdb");
    bench.serves("10.0.0.2", 4, "sdc");
    let slaves = bench.machine().join("sys/block/dm-0/slaves");
    fs::create_dir_all(slaves.join("sdc")).expect("made");
    fs::create_dir_all(bench.machine().join("dev")).expect("made");
    fs::File::create(bench.machine().join("dev/dm-0")).and_then(|file| file.set_len(1 << 20)).expect("a device");
    bench.fake.next("blkid", Ok((0, "TYPE=xfs")));
    // The third portal never answers.
    let usage = bench.usage(&json!({"portals": ["10.0.0.2", "10.0.0.3"], "fsType": "xfs"}));
    bench.plugin.stage(&usage).await.expect("staged");
    let device = bench.machine().join("dev/dm-0");
    assert_eq!(bench.asked(&format!("mount -t xfs -o defaults {} ", device.display())), 1);
    assert_eq!(bench.asked("-p 10.0.0.1:3260 -T iqn.x -I default --login"), 1);
    assert_eq!(bench.asked("-p 10.0.0.3:3260 -T iqn.x -I default --login"), 2, "two rounds");
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("undone");
    assert_eq!(bench.asked(&format!("multipath -f {}", device.display())), 1);
    assert_eq!(bench.asked("--logout"), 3);
}

#[tokio::test(start_paused = true)]
async fn what_leads_nowhere_leaves_nothing() {
    let bench = bench();
    let usage = bench.usage(&json!({}));
    // The login succeeds, but no disk appears.
    let error = bench.plugin.stage(&usage).await.expect_err("no disk");
    assert_eq!(error.trouble, ErrorCause::NotAttached);
    assert_eq!(
        error.text,
        "failed to get any path for iscsi disk, last err seen:\nCould not attach disk: Timeout after 30s"
    );
    assert_eq!((bench.asked("--login"), bench.asked("--logout"), bench.shared().exists()), (1, 1, false));
    // The login fails.
    for (code, output) in [(0, "iface.transport_name = tcp"), (0, ""), (0, ""), (0, ""), (8, "Could not login")] {
        bench.fake.next("iscsiadm", Ok((code, output)));
    }
    let error = bench.plugin.stage(&usage).await.expect_err("refused");
    let cause = "iscsi: failed to log in to portal 10.0.0.1:3260: Could not login (exit status 8)";
    assert_eq!(error.text, format!("failed to get any path for iscsi disk, last err seen:\n{cause}"));
    assert_eq!((bench.asked("--login"), bench.asked("--logout")), (2, 1));
    // The call times out or the pod is deleted: the initiator may complete the login anyway.
    for answer in ["iface.transport_name = tcp", "", "", ""] {
        bench.fake.next("iscsiadm", Ok((0, answer)));
    }
    bench.fake.next("iscsiadm", Err(RunError::Canceled));
    let error = bench.plugin.stage(&usage).await.expect_err("canceled");
    assert!(error.text.ends_with("iscsi: failed to log in to portal 10.0.0.1:3260: context canceled"), "{error}");
    assert_eq!((bench.asked("--login"), bench.asked("--logout"), bench.shared().exists()), (3, 2, false));
    // `iscsiadm` is not installed.
    let missing = "exec: \"iscsiadm\": executable file not found in $PATH";
    bench.fake.next("iscsiadm", Err(RunError::NotStarted(missing.to_owned())));
    let error = bench.plugin.stage(&usage).await.expect_err("missing");
    assert_eq!(error.text, format!("iscsi: failed to read iface: {missing}"));
    assert!(bench.plugin.staged().expect("read").is_empty());
}

#[tokio::test]
async fn nothing_is_asked_without_the_secret() {
    let bench = bench();
    let usage = bench.usage(&json!({"chapAuthSession": true, "secretRef": {"name": "s", "namespace": "m"}}));
    let error = bench.plugin.stage(&usage).await.expect_err("no secret");
    assert_eq!(error.text, "Couldn't get secret m/s error: failed to get a kubernetes client");
    assert!(bench.fake.calls().is_empty() && !bench.shared().exists());
}

#[tokio::test(start_paused = true)]
async fn sessions_stay_for_other_units_of_their_target() {
    let bench = bench();
    bench.serves("10.0.0.1", 3, "sdb");
    let usage = bench.usage(&json!({"volumeMode": "Block"}));
    bench.plugin.stage(&usage).await.expect("staged");
    assert_eq!(bench.asked("mount"), 0);
    let published = bench.plugin.publish(&usage).await.expect("published");
    assert_eq!(published.path, bench.machine().join("dev/sdb"));
    let mapped = bench.plugin.map_dir(&bench.plugin.root, &usage.spec);
    assert!(mapped.ends_with("iscsi/volumeDevices/iface-default/10.0.0.1:3260-iqn.x-lun-1") && mapped.exists());
    // LUN 10 of the same target, as a file system.
    let other = bench.shared().with_file_name("10.0.0.1:3260-iqn.x-lun-10");
    fs::create_dir_all(&other).expect("made");
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("unstaged");
    assert_eq!(bench.asked("--logout"), 0);
    assert!(!mapped.exists());
    fs::remove_dir(&other).expect("removed");
    bench.plugin.stage(&usage).await.expect("staged again");
    assert_eq!(bench.asked("--login"), 1, "the session is there");
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("unstaged");
    assert_eq!(bench.asked("--logout"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_volume_with_an_initiator_of_its_own_has_an_interface_of_its_own() {
    let bench = bench();
    let root = bench.machine();
    bench.fake.on("-I 10.0.0.1:3260:pv --login", "", move || {
        session(&root, 3, IQN, "10.0.0.1", &[(1, "sdb")]);
        disk(&root, "sdb", &["by-path/ip-10.0.0.1:3260-iscsi-iqn.x-lun-1"]);
    });
    let usage = bench.usage(&json!({"initiatorName": "iqn.me", "volumeMode": "Block"}));
    bench.plugin.stage(&usage).await.expect("staged");
    assert_eq!(bench.asked("-m iface -I 10.0.0.1:3260:pv -o update -n iface.initiatorname -v iqn.me"), 1);
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("unstaged");
    assert_eq!(bench.asked("-m iface -I 10.0.0.1:3260:pv -o delete"), 1);
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_agent_left_is_known() {
    let bench = bench();
    bench.serves("10.0.0.1", 3, "sdb");
    let usage = bench.usage(&json!({}));
    bench.plugin.stage(&usage).await.expect("staged");
    let found =
        FoundVolume { pod: "u".into(), name: "pv".to_owned(), mode: Mode::Filesystem, path: usage.target.clone() };
    bench.plugin.rebuild(&found).expect_err("not mounted");
    bench.plugin.publish(&usage).await.expect("published");
    let rebuilt = bench.plugin.rebuild(&found).expect("known");
    assert_eq!((rebuilt.traits.volume.as_str(), rebuilt.spec.name.as_str()), ("10.0.0.1:iqn.x:1", "pv"));
    let staged = bench.plugin.staged().expect("read");
    let [(Mode::Filesystem, one)] = staged.as_slice() else { panic!("{staged:?}") };
    assert_eq!((&one.traits, one.spec.name.as_str()), (&rebuilt.traits, "pv"));
    let gone = Removal { spec: Arc::new(rebuilt.spec), ..testing::removal(&usage, false) };
    bench.plugin.unpublish(&testing::removal(&usage, true)).await.expect("unpublished");
    bench.plugin.unstage(&gone).await.expect("unstaged");
    assert_eq!((bench.asked("--logout"), bench.shared().exists()), (1, false));
}
