//! Fixture of in-process runtime tests: skip check, directory, unique names, network namespace, cleanup, leak check.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use berth_sys::{
    cgroup::{GroupPath, Hierarchy},
    netlink::{NetlinkFamily, Socket, rtnetlink},
};
use nix::sched::{CloneFlags, unshare};

use super::cleanup;

/// Reason why pods cannot run here; `None` if they can.
pub fn obstacle() -> Option<String> {
    let own = std::env::current_exe().expect("failed to find the test binary");
    let has_shim = own.ancestors().skip(1).take(2).any(|folder| folder.join("berth-shim").is_file());
    super::missing().or_else(|| (!has_shim).then(|| "needs berth-shim next to the test binary".to_owned()))
}

/// Returns whether a test must be skipped and prints its name and the reason.
///
/// # Panics
/// The test would be skipped on CI.
pub fn skips(test: &str) -> bool {
    let Some(why) = obstacle() else { return false };
    super::skipped(test, &why);
    true
}

/// Directory of a test; drop removes its mounts, shims, cgroups, and namespaces as well.
pub struct RuntimeFixture(tempfile::TempDir);

impl RuntimeFixture {
    /// Creates an empty directory.
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("failed to create temporary directory"))
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Asserts that pods have left nothing on the machine.
    pub fn assert_clean(&self) {
        assert_eq!(left(self.path()), Vec::<String>::new());
    }
}

impl Drop for RuntimeFixture {
    fn drop(&mut self) {
        cleanup::end_shims(&self.path().join("state"));
        if let (Ok(all), Some(group)) = (Hierarchy::detect(), GroupPath::parse(&format!("/{}", group(self.path())))) {
            let _ = all.remove(&group);
        }
        drop_parent_group(self.path());
        cleanup::remove_network(&bridge(self.path()));
        cleanup::unmount_below(&self.path().to_string_lossy());
    }
}

/// Runs a test in a network namespace of its own, so that bridge, packet filter, and sysctls of the host stay
/// unchanged; prints a message if it must be skipped.
pub fn in_network_namespace<F: Future<Output = ()>>(test: &str, body: impl FnOnce(RuntimeFixture) -> F + Send) {
    if skips(test) {
        return;
    }
    thread::scope(|scope| {
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("failed to create network namespace");
            Socket::open(NetlinkFamily::Route)
                .and_then(|mut socket| socket.request(rtnetlink::up(1)))
                .expect("loopback");
            let place = RuntimeFixture::new();
            // Worker threads, and the shims they start, inherit this thread's namespace.
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.expect("failed to build the tokio runtime").block_on(body(place));
        };
        let thread =
            thread::Builder::new().name(test.to_owned()).spawn_scoped(scope, run).expect("failed to start thread");
        thread.join().expect("the test panicked");
    });
}

/// Mounts, cgroups, and runtime directories that pods of a test have left.
pub fn left(place: &Path) -> Vec<String> {
    let mut left = Vec::new();
    let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
    let below = place.display().to_string();
    let of_pods = |line: &&str| line.contains(&below) && !line.contains("/state/exe/");
    left.extend(mounts.lines().filter(of_pods).map(str::to_owned));
    let group = group(place);
    for root in ["cpu", "memory", "pids", "devices", "systemd", "unified", ""] {
        let parent = Path::new("/sys/fs/cgroup").join(root).join(&group);
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                left.push(entry.path().display().to_string());
            }
        }
    }
    for folder in ["root/sandboxes", "root/containers", "root/snap", "state/s"] {
        left.extend(cleanup::names(&place.join(folder)).iter().map(|name| format!("{folder}/{name}")));
    }
    left
}

/// Unique name of a test's resources.
fn own_name(place: &Path) -> String {
    place.file_name().unwrap_or_default().to_string_lossy().trim_start_matches('.').to_owned()
}

/// Cgroup of a test's pods.
pub fn group(place: &Path) -> String {
    format!("berth-test-{}", own_name(place))
}

/// Bridge of a test's pods. Namespace files are named after it; without a unique name, tests would take those of
/// others.
pub fn bridge(place: &Path) -> String {
    format!("bt{}", own_name(place))
}

/// File that names a pod's network namespace.
pub fn namespace_file(place: &Path, sandbox: &str) -> PathBuf {
    cleanup::namespace_file(&bridge(place), sandbox)
}

fn drop_parent_group(place: &Path) {
    let group = group(place);
    for root in ["cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "systemd", "hugetlb", ""] {
        let _ = fs::remove_dir(Path::new("/sys/fs/cgroup").join(root).join(&group));
    }
}
