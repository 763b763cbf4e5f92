//! Power cuts: whatever was not synced is lost. Behavior: spec 09 §7 (AC-09-E4).
//!
//! `$ROOT` is its own ext4 that loses as much as it may: it commits its journal every ten minutes only, and does not
//! flush a file that is renamed over another. The power cut is the one of the kernel's own tests: the file system is
//! shut down at once without a journal commit. Then all processes are killed, what a reboot removes is removed, the
//! file system is mounted again, and the next daemon has another boot id. It verifies every image before it serves.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use berth_proto::cri::{self, ContainerState, PodSandboxState, image_service_client::ImageServiceClient};
use nix::mount::{MsFlags, mount, umount2};
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use tonic::{Status, transport::Channel};

use crate::{
    fixture::{DaemonOptions, Fixture, Pids, container, pod},
    registry::{self, Registry},
    shims::halted,
    test_machine, tests,
};

tests! {
    a_power_cut_at_any_step_of_a_pull_leaves_whole_images
    power_cuts_at_any_time_leave_nothing_to_clean
}

/// Steps of an image pull.
const PULL: &[&str] = &[
    "blob.written",
    "blob.synced",
    "blob.renamed",
    "layer.unpacked",
    "layer.synced",
    "layer.written",
    "image.content",
    "image.written",
];
/// Steps of an image removal.
const REMOVE: &[&str] = &["image.removed", "layer.hidden"];
/// Environment variable with the number of power cuts at random times (`make test-long`: 100).
const CUTS_VARIABLE: &str = "BERTH_POWER_CUTS";
/// Default number of such cuts: about 15 s.
const CUTS: u32 = 10;
/// Approximate duration of a pull, a pod, and a removal.
const CYCLE: Duration = Duration::from_millis(900);
/// Timeout of an unmount.
const LIMIT: Duration = Duration::from_secs(60);

type Images = ImageServiceClient<Channel>;

/// All steps of images.
pub fn steps() -> impl Iterator<Item = String> {
    [PULL, REMOVE].into_iter().flatten().map(|step| (*step).to_owned())
}

/// A loop-mounted disk, and a replaced boot id.
struct Disk {
    image: PathBuf,
    at: PathBuf,
    boot: PathBuf,
}

impl Disk {
    fn new(place: &Path) -> Self {
        let out = Self { image: place.join("disk"), at: place.join("root"), boot: place.join("boot") };
        // Sparse, in memory; a pull requires a gigabyte of free space.
        File::create(&out.image).and_then(|file| file.set_len(3 << 30)).expect("a file");
        let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-m", "0"]).arg(&out.image).status();
        assert!(made.expect("mke2fs").success());
        fs::create_dir_all(&out.at).expect("a directory");
        fs::write(&out.boot, "").expect("written");
        let (at, none) = ("/proc/sys/kernel/random/boot_id", None::<&str>);
        mount(Some(&out.boot), at, none, MsFlags::MS_BIND, none).expect("mounted");
        out.mount();
        out
    }

    fn mount(&self) {
        fs::write(&self.boot, format!("{:032x}\n", rand::random::<u128>())).expect("written");
        let mut mount = Command::new("mount");
        mount.args(["-t", "ext4", "-o", "loop,noauto_da_alloc,commit=600,data=writeback"]);
        assert!(mount.arg(&self.image).arg(&self.at).status().expect("mount").success());
    }

    /// Cuts the power: everything that is not on the disk is lost.
    fn go_dark(&self) {
        /// `FS_IOC_SHUTDOWN`.
        const SHUTDOWN: Opcode = opcode::read::<u32>(b'X', 125);
        /// `EXT4_GOING_FLAGS_NOLOGFLUSH`: without a journal commit.
        const AT_ONCE: u32 = 2;
        let root = File::open(&self.at).expect("a directory");
        #[allow(unsafe_code, reason = "no program that is everywhere does it")]
        // SAFETY: the request reads one number of that size and writes nothing.
        let done = unsafe { ioctl(&root, Setter::<SHUTDOWN, u32>::new(AT_ONCE)) };
        done.expect("shut down");
    }

    /// Retries until nothing uses the file system and its loop device.
    async fn unmount(&self) {
        let begun = Instant::now();
        while let Err(error) = umount2(&self.at, nix::mount::MntFlags::empty()) {
            assert!(begun.elapsed() < LIMIT, "{error}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let has_device = || {
            let output = Command::new("losetup").arg("-j").arg(&self.image).output().expect("losetup");
            !output.stdout.is_empty()
        };
        while has_device() {
            assert!(begun.elapsed() < LIMIT, "the disk is in use");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Reason why power cuts cannot be simulated here; `None` if they can.
fn obstacle() -> Option<&'static str> {
    let has =
        |program: &str| Command::new(program).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !has("mke2fs") || !has("losetup") {
        return Some("needs mke2fs and losetup");
    }
    let systems = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !systems.contains("\text4\n") {
        return Some("needs ext4");
    }
    if Path::new("/dev/loop-control").exists() { None } else { Some("needs loop devices") }
}

fn skips(test: &str) -> bool {
    let Some(why) = obstacle() else { return false };
    assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI: {why}");
    println!("skipped {test}: {why}");
    true
}

/// A daemon on a disk whose power can be cut.
async fn powered() -> (Fixture, Disk) {
    let mut disk = None;
    let rig = Fixture::with(|place| {
        disk = Some(Disk::new(place));
        DaemonOptions { verifies: true, ..DaemonOptions::default() }
    });
    (rig.await, disk.expect("made"))
}

/// Cuts and restores the power: a new daemon serves, every image is complete, and nothing runs.
async fn power_cut(rig: &mut Fixture, disk: &Disk, what: &str) {
    disk.go_dark();
    rig.kill();
    rig.disarm();
    test_machine::reboot(&rig.place.join("state")).await;
    disk.unmount().await;
    disk.mount();
    println!("{what}");
    rig.restart().await;
    let ready: Vec<_> =
        rig.sandboxes().await.into_iter().filter(|s| s.state() == PodSandboxState::SandboxReady).collect();
    assert_eq!(ready, [], "{what}");
    let runs = |c: &cri::Container| c.state() == ContainerState::ContainerRunning;
    let running: Vec<_> = rig.containers().await.into_iter().filter(runs).collect();
    assert_eq!(running, [], "{what}");
    rig.remove_all(what).await;
}

async fn pull(images: &Images, name: &str) -> Result<String, Status> {
    let image = Some(cri::ImageSpec { image: name.to_owned(), ..Default::default() });
    let request = cri::PullImageRequest { image, auth: None, sandbox_config: None };
    Ok(images.clone().pull_image(request).await?.into_inner().image_ref)
}

async fn has(images: &Images, name: &str) -> bool {
    let image = Some(cri::ImageSpec { image: name.to_owned(), ..Default::default() });
    let request = cri::ImageStatusRequest { image, verbose: false };
    images.clone().image_status(request).await.expect("answers").into_inner().image.is_some()
}

async fn remove_image(images: &Images, name: &str) -> Result<(), Status> {
    let image = Some(cri::ImageSpec { image: name.to_owned(), ..Default::default() });
    images.clone().remove_image(cri::RemoveImageRequest { image }).await.map(drop)
}

/// Runs a pod of an image of the registry and reads all its files; returns the number of bytes and links.
async fn reads_all(rig: &Fixture, image: &str) -> Result<String, Status> {
    let mut config = pod(rig, "reads", Pids::Container);
    config.port_mappings.clear();
    let sandbox = rig.run(&config).await?;
    let mut one = container("c", "echo x > /own; while :; do sleep 0.1; done", Pids::Container);
    one.image = Some(cri::ImageSpec { image: image.to_owned(), ..Default::default() });
    let id = rig.create(&sandbox, &one).await?;
    rig.start_container(&id).await?;
    let script = "/bin/busybox find /data-* -type f -exec cat {} + | wc -c; /bin/busybox find /data-* -type l | wc -l";
    Ok(rig.exec(&id, script).await?.0)
}

/// Checks images and pods after the power is back.
async fn all_is_well(rig: &mut Fixture, image: &str, what: &str) {
    pull(&rig.images, image).await.unwrap_or_else(|e| panic!("{what}, pulled: {e}"));
    // The next daemon verifies the images again.
    rig.restart().await;
    let read = reads_all(rig, image).await.unwrap_or_else(|e| panic!("{what}, runs: {e}"));
    assert_eq!(read, registry::expected_counts(), "{what}");
    rig.remove_all(what).await;
}

// AC-09-E4: at every point at which something is synced, and between them.
async fn a_power_cut_at_any_step_of_a_pull_leaves_whole_images(rig: Fixture) {
    drop(rig);
    if skips("a_power_cut_at_any_step_of_a_pull_leaves_whole_images") {
        return;
    }
    let (mut rig, disk) = powered().await;
    let registry = Registry::start(&rig.place);
    let [first, second] = &registry.images;
    let alone = stored(&rig);
    for (step, is_pull) in PULL.iter().map(|step| (step, true)).chain(REMOVE.iter().map(|step| (step, false))) {
        // The other image shares a layer; every second time it is already stored.
        for has_other in [false, true] {
            let what = format!("power cut at {step}, {}", if has_other { "beside another" } else { "alone" });
            if has_other {
                pull(&rig.images, second).await.unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            if !is_pull {
                pull(&rig.images, first).await.unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            rig.arm(step, "halt");
            let (images, name) = (rig.images.clone(), first.clone());
            let asking = tokio::spawn(async move {
                match is_pull {
                    true => pull(&images, &name).await.map(drop),
                    false => remove_image(&images, &name).await,
                }
            });
            halted().await;
            power_cut(&mut rig, &disk, &what).await;
            let _lost = asking.await;
            let is_here = has(&rig.images, second).await;
            assert!(is_here == has_other, "{what}: what was there before is there still");
            all_is_well(&mut rig, first, &what).await;
            for name in [first, second] {
                remove_image(&rig.images, name).await.unwrap_or_else(|e| panic!("{what}, removed: {e}"));
            }
            let begun = Instant::now();
            while stored(&rig) != alone {
                assert!(begun.elapsed() < LIMIT, "{what}: {:?} instead of {alone:?}", stored(&rig));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

/// Number of stored layers, blobs, and partial blobs.
fn stored(rig: &Fixture) -> [usize; 3] {
    ["layers", "content/blobs/sha256", "content/ingest"]
        .map(|folder| fs::read_dir(rig.place.join("root").join(folder)).into_iter().flatten().count())
}

/// Pulls, runs, and removes until the power is cut.
async fn live(rig: &Fixture, [first, second]: &[String; 2]) -> Result<(), Status> {
    loop {
        pull(&rig.images, first).await?;
        tokio::try_join!(reads_all(rig, first), pull(&rig.images, second))?;
        rig.remove_all("lives").await;
        remove_image(&rig.images, first).await?;
        pull(&rig.images, first).await?;
        remove_image(&rig.images, second).await?;
        remove_image(&rig.images, first).await?;
    }
}

// AC-09-E4
async fn power_cuts_at_any_time_leave_nothing_to_clean(rig: Fixture) {
    drop(rig);
    if skips("power_cuts_at_any_time_leave_nothing_to_clean") {
        return;
    }
    let (mut rig, disk) = powered().await;
    let registry = Registry::start(&rig.place);
    all_is_well(&mut rig, &registry.images[0], "at first").await;
    let cuts = std::env::var(CUTS_VARIABLE).map_or(CUTS, |text| text.parse().expect("a number of power cuts"));
    for number in 0..cuts {
        let after = CYCLE.mul_f64(rand::random_range(0.0..1.0));
        let what = format!("power cut {number}, after {after:?}");
        tokio::select! {
            lived = live(&rig, &registry.images) => panic!("{what}: {lived:?}"),
            () = tokio::time::sleep(after) => {}
        }
        power_cut(&mut rig, &disk, &what).await;
        if number % 10 == 9 {
            all_is_well(&mut rig, &registry.images[0], &what).await;
        }
    }
    all_is_well(&mut rig, &registry.images[1], "at last").await;
}
