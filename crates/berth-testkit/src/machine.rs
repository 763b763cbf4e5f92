//! QEMU virtual machine without acceleration: Debian cloud kernel, initramfs of busybox and tests.
//!
//! Needs `qemu-system-x86`, `busybox-static`, and an unpacked kernel package, as `examples/install-deps.sh` unpacks
//! it.

use std::{
    fs,
    io::{self, BufRead, BufReader},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use super::machine_systemd;

/// Environment variable with the kernel directory, searched before the default ones.
const KERNEL: &str = "BERTH_TEST_KERNEL";
/// Default kernel directories.
const KERNELS: [&str; 2] = ["/var/cache/berth-tests/kernel", "/"];
/// Kernel modules to load, in order of their dependencies.
const MODULES: [&str; 6] = [
    "fs/overlayfs/overlay",
    "net/llc/llc",
    "net/802/stp",
    "net/bridge/bridge",
    "drivers/net/veth",
    "drivers/block/loop",
];
/// Additional modules of NFS client and server, in order of their dependencies.
pub const NFS_MODULES: [&str; 11] = [
    "net/sunrpc/sunrpc",
    "net/sunrpc/auth_gss/auth_rpcgss",
    "net/dns_resolver/dns_resolver",
    "fs/nfs_common/grace",
    "fs/nfs_common/nfs_acl",
    "fs/lockd/lockd",
    "fs/netfs/netfs",
    "fs/fscache/fscache",
    "fs/nfs/nfs",
    "fs/nfs/nfsv4",
    "fs/nfsd/nfsd",
];
/// Maximum age of a base image.
const BASE_AGE: Duration = Duration::from_secs(24 * 60 * 60);
const APPLETS: [&str; 16] = [
    "sh",
    "mount",
    "cp",
    "mkdir",
    "switch_root",
    "insmod",
    "ip",
    "poweroff",
    "hostname",
    "echo",
    "cat",
    "ls",
    "mv",
    "rm",
    "umount",
    "sleep",
];
/// QEMU's arguments for the memory of all machines, in MiB.
const MEMORY: [&str; 2] = ["-m", "1280"];
/// QEMU's arguments for two CPUs.
const TWO_CPUS: [&str; 2] = ["-smp", "2"];
/// QEMU's arguments for two sockets with two cores each. Each socket is a NUMA node with half of [`MEMORY`].
const TWO_NUMA_NODES: [&str; 10] = [
    "-smp",
    "4,sockets=2,cores=2,threads=1",
    "-object",
    "memory-backend-ram,id=m0,size=640M",
    "-object",
    "memory-backend-ram,id=m1,size=640M",
    "-numa",
    "node,nodeid=0,cpus=0-1,memdev=m0",
    "-numa",
    "node,nodeid=1,cpus=2-3,memdev=m1",
];
/// Last line of a machine that shut down by itself.
pub const END: &str = "== END";

/// Script of PID 1 in the initramfs: copies it to a tmpfs, because the initial rootfs does not support `pivot_root`.
const FIRST: &str = "#!/bin/sh
mount -t tmpfs -o size=700m new /new
cp -a /bin /t /lib /lib64 /usr /etc /second /mods /new 2>/dev/null
mkdir -p /new/proc /new/sys /new/dev /new/run /new/tmp /new/root /new/var
exec switch_root /new /second
";

/// Beginning of the script of PID 1 on the real root file system.
const MOUNTS: &str = "#!/bin/sh
export PATH=/bin RUST_BACKTRACE=0
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts; mount -t tmpfs shm /dev/shm; mount -t devpts pts /dev/pts
mount -t tmpfs run /run; mount -t tmpfs tmp /tmp; mount -t cgroup2 cgroup /sys/fs/cgroup
";

/// Kernel image with its modules.
pub struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// Whether all of these modules exist.
    pub fn has(&self, modules: &[&str]) -> bool {
        modules.iter().all(|module| self.modules.join(format!("{module}.ko")).is_file())
    }
}

/// Finds a kernel to boot.
///
/// # Errors
/// The reason why no machine can run here.
pub fn kernel() -> Result<Kernel, &'static str> {
    if let Some(why) = obstacle() {
        return Err(why);
    }
    let configured = std::env::var_os(KERNEL).map(PathBuf::from);
    let places = configured.into_iter().chain(KERNELS.map(PathBuf::from));
    let mut found = places.filter_map(|place| {
        let images = fs::read_dir(place.join("boot")).ok()?.flatten().map(|entry| entry.path());
        images.into_iter().find_map(|image| {
            let version = image.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned();
            let modules = place.join("lib/modules").join(version).join("kernel");
            let is_whole = MODULES.iter().all(|module| modules.join(format!("{module}.ko")).is_file());
            is_whole.then_some(Kernel { image, modules })
        })
    });
    found.next().ok_or("needs an unpacked Debian cloud kernel: examples/install-deps.sh")
}

fn obstacle() -> Option<&'static str> {
    let has = |program: &str| Command::new(program).arg("--help").stdout(Stdio::null()).status().is_ok();
    if !cfg!(target_arch = "x86_64") {
        return Some("runs on x86_64 only");
    }
    if !has("qemu-system-x86_64") {
        return Some("needs qemu-system-x86");
    }
    if !has("/bin/busybox") { Some("needs busybox-static") } else { None }
}

/// Prints that a test is skipped.
///
/// # Panics
/// The test would be skipped on CI.
pub fn skip(name: &str, why: &str) {
    let may_be = std::env::var_os("CI").is_none() || !cfg!(target_arch = "x86_64");
    assert!(may_be, "{name} may not be skipped on CI: {why}");
    println!("skipped {name}: {why}");
}

/// Root file system of a machine besides the base image: programs under test, and files of the test.
pub struct Root(PathBuf);

/// Base image of all machines: busybox, kernel modules, systemd with its services. Created once per build directory.
///
/// A machine's own files are another archive appended to it: the kernel unpacks one after the other.
fn base(kernel: &Kernel) -> PathBuf {
    let directory = std::env::current_exe()
        .expect("failed to find the test binary")
        .ancestors()
        .nth(2)
        .expect("no parent directory")
        .to_owned();
    let image = directory.join("machine-base.cpio.gz");
    let lock = fs::File::create(directory.join("machine-base.lock")).expect("failed to create the lock file");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("locked");
    let changed = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    // Programs of other packages change only with an upgrade of this machine: a day is enough.
    let is_new = |at: SystemTime| at.elapsed().is_ok_and(|age| age < BASE_AGE) && changed(&kernel.image) < Some(at);
    if !changed(&image).is_some_and(is_new) {
        let place = tempfile::tempdir_in(&directory).expect("failed to create directory");
        let root = Root::new(place.path());
        root.lay_down_base(kernel);
        fs::rename(root.archive(), &image).expect("renamed");
    }
    image
}

impl Root {
    /// Creates an empty root file system in that directory.
    pub fn new(place: &Path) -> Self {
        let root = place.join("root");
        for folder in ["bin", "t", "lib", "lib64", "usr", "etc", "mods", "new", "dev"] {
            fs::create_dir_all(root.join(folder)).expect("failed to create directory");
        }
        Self(root)
    }

    fn lay_down_base(&self, kernel: &Kernel) {
        fs::copy("/bin/busybox", self.0.join("bin/busybox")).expect("busybox");
        for applet in APPLETS {
            symlink("busybox", self.0.join("bin").join(applet)).expect("failed to link applet");
        }
        for module in MODULES.iter().chain(&NFS_MODULES) {
            let from = kernel.modules.join(format!("{module}.ko"));
            // NFS modules may be missing: the NFS test checks for them.
            if from.is_file() {
                fs::copy(from, self.0.join("mods").join(format!("{}.ko", file_name(module)))).expect(module);
            }
        }
        self.file("etc/passwd", "root:x:0:0::/:/bin/sh\n");
        self.file("etc/group", "root:x:0:\n");
        self.executable("init", FIRST);
        machine_systemd::lay_down_base(self);
    }

    fn executable(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).expect("written");
        fs::set_permissions(self.0.join(name), fs::Permissions::from_mode(0o755)).expect("failed to copy program");
    }

    /// Adds a program with its shared libraries, if any.
    pub fn program(&self, from: &Path, name: &str) {
        let to = self.0.join(name);
        fs::create_dir_all(to.parent().expect("failed to create directory")).expect("failed to create directory");
        // Most of a debug build is debug information; without `strip` the programs are only larger.
        let stripped = Command::new("strip").arg("-o").arg(&to).arg(from).status();
        if !stripped.is_ok_and(|status| status.success()) {
            fs::copy(from, &to).expect("failed to copy program");
        }
        for library in libraries(from) {
            let to = self.0.join(library.strip_prefix("/").expect("path is not absolute"));
            fs::create_dir_all(to.parent().expect("failed to create directory")).expect("failed to create directory");
            fs::copy(&library, to).expect("failed to copy library");
        }
    }

    /// Copies a file of the host to the same path.
    pub fn same(&self, name: &str) {
        let to = self.0.join(name.trim_start_matches('/'));
        fs::create_dir_all(to.parent().expect("failed to create directory")).expect("failed to create directory");
        fs::copy(name, to).unwrap_or_else(|e| panic!("{name}: {e}"));
    }

    /// Adds a symlink `name` to `to`.
    pub fn link(&self, to: &str, name: &str) {
        let at = self.0.join(name);
        fs::create_dir_all(at.parent().expect("failed to create directory")).expect("failed to create directory");
        symlink(to, at).expect("failed to create symbolic link");
    }

    /// Path on the host of a file in this root; creates its parent directory.
    pub fn path(&self, name: &str) -> PathBuf {
        let at = self.0.join(name);
        fs::create_dir_all(at.parent().expect("failed to create directory")).expect("failed to create directory");
        at
    }

    /// Writes a text file.
    pub fn file(&self, name: &str, text: &str) {
        let to = self.0.join(name);
        fs::create_dir_all(to.parent().expect("failed to create directory")).expect("failed to create directory");
        fs::write(to, text).expect("written");
    }

    /// Builds the initramfs. `second` is the script of PID 1 on the real root file system.
    pub fn pack(&self, kernel: &Kernel, second: &str) -> PathBuf {
        self.executable("second", &format!("{MOUNTS}{}{second}", load(&MODULES)));
        let (own, whole) = (self.archive(), self.0.with_file_name("initrd"));
        let mut out = fs::File::create(&whole).expect("failed to create file");
        for part in [base(kernel), own] {
            io::copy(&mut fs::File::open(&part).expect("failed to open archive"), &mut out).expect("room");
        }
        whole
    }

    /// Packs this root into an archive beside it.
    fn archive(&self) -> PathBuf {
        let pack = "find . | busybox cpio -o -H newc 2>/dev/null | gzip -1 > ../archive";
        let packed = Command::new("sh").args(["-c", pack]).current_dir(&self.0).status().expect("failed to run sh");
        assert!(packed.success());
        self.0.with_file_name("archive")
    }
}

/// Shell commands that load kernel modules, in this order.
pub fn load(modules: &[&str]) -> String {
    modules.iter().map(|module| format!("insmod /mods/{}.ko\n", file_name(module))).collect()
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Shared libraries of a program; none if it is static.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&output).into_owned();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    words.map(PathBuf::from).collect()
}

/// Runs a machine of two CPUs until it shuts down or the limit passes; returns its console output.
pub fn run(kernel: &Kernel, image: &Path, limit: Duration) -> Vec<String> {
    run_with_processors(kernel, image, limit, &TWO_CPUS)
}

/// Runs a machine like [`run`], but with four CPUs: 0 and 1 on NUMA node 0, 2 and 3 on NUMA node 1.
pub fn run_with_numa_nodes(kernel: &Kernel, image: &Path, limit: Duration) -> Vec<String> {
    run_with_processors(kernel, image, limit, &TWO_NUMA_NODES)
}

fn run_with_processors(kernel: &Kernel, image: &Path, limit: Duration, processors: &[&str]) -> Vec<String> {
    let mut machine = Command::new("qemu-system-x86_64");
    machine.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-nographic", "-no-reboot"]);
    machine.args(MEMORY).args(processors);
    machine.args(["-nodefaults", "-serial", "stdio", "-kernel"]).arg(&kernel.image).arg("-initrd").arg(image);
    machine.args(["-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=all"]);
    let machine = machine.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
    watch(machine.expect("failed to start qemu"), limit)
}

fn watch(mut machine: Child, limit: Duration) -> Vec<String> {
    let (console, done) = (machine.stdout.take().expect("console is not piped"), Arc::new(AtomicBool::new(false)));
    let is_done = done.clone();
    let machine = thread::spawn(move || {
        let begun = Instant::now();
        while !is_done.load(Ordering::Relaxed) && begun.elapsed() < limit {
            thread::sleep(Duration::from_millis(100));
        }
        let _ = machine.kill();
        let _ = machine.wait();
    });
    let mut lines = Vec::new();
    for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        let is_end = line.ends_with(END);
        lines.push(line);
        if is_end {
            break;
        }
    }
    done.store(true, Ordering::Relaxed);
    machine.join().expect("ended");
    lines
}

/// Names of the tests that did not pass, by the console output, which is then printed.
pub fn failed<'a>(names: impl IntoIterator<Item = &'a str>, lines: &[String]) -> Vec<&'a str> {
    let has = |name: &str| lines.iter().any(|line| line.ends_with(&format!("test {name} ... ok")));
    let failed: Vec<&str> = names.into_iter().filter(|name| !has(name)).collect();
    if !failed.is_empty() {
        println!("--- console output of the virtual machine\n{}\n---", lines.join("\n"));
    }
    failed
}
