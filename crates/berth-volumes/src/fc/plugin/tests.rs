//! The plugin on a fake host with scripted disks and mounts.

use serde_json::{Value, json};

use super::*;
use crate::testing::{self, FakeMachine, disk};

struct Bench {
    dir: tempfile::TempDir,
    fake: Arc<FakeMachine>,
    plugin: FcPlugin,
}

fn bench() -> Bench {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir(dir.path().join("k")).expect("made");
    let fake = FakeMachine::new();
    let blocks = ScsiDisks::below(&dir.path().join("m"));
    let plugin = FcPlugin::with_disks(&dir.path().join("k"), fake.clone(), blocks);
    Bench { dir, fake, plugin }
}

impl Bench {
    fn usage(&self, source: &Value, mode: &str) -> Usage {
        let volume = json!({"metadata": {"name": "pv"}, "spec": {"fc": source, "volumeMode": mode}});
        let volume = serde_json::from_value(volume).expect("a volume");
        testing::usage(&self.plugin.root, PLUGIN, VolumeSpec::persistent(Arc::new(volume), Arc::default(), false))
    }

    fn machine(&self) -> PathBuf {
        self.dir.path().join("m")
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.machine().join(path)).expect("readable")
    }

    fn joined(&self, name: &str, ways: &[&str]) {
        for way in ways {
            fs::create_dir_all(self.machine().join("sys/block").join(name).join("slaves").join(way)).expect("made");
        }
        let device = self.machine().join("dev").join(name);
        fs::File::create(device).and_then(|file| file.set_len(1 << 20)).expect("a device");
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_is_found_mounted_and_forgotten() {
    let bench = bench();
    disk(&bench.machine(), "sdb", &["by-path/pci-0000:05:00.0-fc-0x50060e80-lun-2"]);
    let usage = bench.usage(&json!({"targetWWNs": ["50060e80"], "lun": 2, "fsType": "xfs"}), "Filesystem");
    let traits = bench.plugin.describe(&usage.pod, &usage.spec).await.expect("described");
    assert_eq!((traits.volume.as_str(), traits.attachable, traits.stages), ("[50060e80]:2", true, true));
    bench.fake.next("blkid", Ok((2, "")));
    bench.plugin.stage(&usage).await.expect("staged");
    let shared = bench.plugin.root.join("plugins/kubernetes.io/fc/50060e80-lun-2");
    let (device, shared_text) = (bench.machine().join("dev/sdb"), shared.display().to_string());
    let device = device.display();
    assert_eq!(
        bench.fake.calls(),
        [
            format!("blkid -p -s TYPE -s PTTYPE -o export {device}"),
            format!("mkfs.xfs -f {device}"),
            format!("mount -t xfs -o defaults {device} {shared_text}"),
        ]
    );
    bench.plugin.publish(&usage).await.expect("published");
    let found =
        FoundVolume { pod: "u".into(), name: "pv".to_owned(), mode: Mode::Filesystem, path: usage.target.clone() };
    let rebuilt = bench.plugin.rebuild(&found).expect("known");
    assert_eq!((rebuilt.traits, rebuilt.spec.name.as_str()), (traits, "pv"));
    assert_eq!(bench.plugin.staged().expect("read").len(), 1);
    bench.plugin.unpublish(&testing::removal(&usage, true)).await.expect("unpublished");
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("unstaged");
    assert_eq!(bench.fake.calls().last().cloned(), Some(format!("blockdev --flushbufs {device}")));
    assert_eq!(bench.read("sys/block/sdb/device/delete"), "1");
    assert!(!shared.exists() && bench.plugin.staged().expect("read").is_empty());
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("once more");
}

#[tokio::test(start_paused = true)]
async fn the_joined_device_is_preferred_and_all_its_ways_go() {
    let bench = bench();
    disk(&bench.machine(), "sdb", &["by-id/scsi-3600a"]);
    disk(&bench.machine(), "sdc", &[]);
    bench.joined("dm-3", &["sdb", "sdc"]);
    let usage = bench.usage(&json!({"wwids": ["3600z", "3600a"]}), "Block");
    bench.plugin.stage(&usage).await.expect("staged");
    let published = bench.plugin.publish(&usage).await.expect("published");
    let device = bench.machine().join("dev/dm-3");
    assert_eq!(published.path, device);
    let mapped = bench.plugin.map_dir(&bench.plugin.root, &usage.spec);
    assert!(mapped.ends_with("plugins/kubernetes.io/fc/volumeDevices/3600z-3600a") && mapped.exists());
    // Another program uses the device: nothing is deleted.
    bench.fake.next("multipath", Ok((1, "map in use")));
    let error = bench.plugin.unstage(&testing::removal(&usage, false)).await.expect_err("in use");
    let text = format!("failed to flush multipath device {}: exit status 1\nmap in use", device.display());
    assert_eq!((error.class, error.text), (Class::Uncertain, text));
    assert_eq!(bench.read("sys/block/sdb/device/delete"), "");
    bench.plugin.unstage(&testing::removal(&usage, false)).await.expect("unstaged");
    for way in ["sdb", "sdc"] {
        assert_eq!(bench.read(&format!("sys/block/{way}/device/delete")), "1", "{way}");
    }
}

#[tokio::test(start_paused = true)]
async fn hosts_rescan_for_a_missing_disk() {
    let bench = bench();
    let usage = bench.usage(&json!({"targetWWNs": ["5"], "lun": 0}), "Filesystem");
    let scan = bench.machine().join("sys/class/scsi_host/host0/scan");
    fs::create_dir_all(scan.parent().expect("below a folder")).expect("made");
    fs::write(&scan, "").expect("written");
    let error = bench.plugin.stage(&usage).await.expect_err("no disk");
    assert_eq!((error.text.as_str(), error.trouble), ("no fc disk found", ErrorCause::NotAttached));
    assert_eq!(bench.read("sys/class/scsi_host/host0/scan"), "- - -");
    assert!(bench.plugin.staged().expect("read").is_empty());
}
