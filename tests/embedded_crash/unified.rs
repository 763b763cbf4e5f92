//! The runtime on a machine whose control groups are the unified hierarchy alone, and whose kernel has no packet filter.
//!
//! A virtual machine without acceleration: Debian's cloud kernel, and an initial file system of busybox, this program and the
//! shim. What runs there is in `v2.rs`. Needs `qemu-system-x86`, `busybox-static` and an unpacked kernel package, as
//! `examples/install-deps.sh` lays it down; says so where it is skipped.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{ground, v2};

/// Its name.
pub const NAME: &str = "the_runtime_on_a_machine_of_the_unified_hierarchy";
/// The machine is not let run for longer.
const LIMIT: Duration = Duration::from_secs(240);
/// Where a kernel is looked for, besides where this variable says.
const KERNEL: &str = "BERTH_TEST_KERNEL";
/// See [`KERNEL`].
const KERNELS: [&str; 2] = ["/var/cache/berth-tests/kernel", "/"];
/// What of the kernel is not built in, in the order of their needs.
const MODULES: [&str; 5] =
    ["fs/overlayfs/overlay", "net/llc/llc", "net/802/stp", "net/bridge/bridge", "drivers/net/veth"];
/// The last line of a machine that went down by itself.
const END: &str = "== END";

/// Process 1 until the real file system is there: a root cannot be changed on the first one.
const FIRST: &str = "#!/bin/sh
mount -t tmpfs -o size=700m new /new
cp -a /bin /t /lib /lib64 /etc /second /mods /new 2>/dev/null
mkdir -p /new/proc /new/sys /new/dev /new/run /new/tmp /new/root
exec switch_root /new /second
";

/// Runs it; whether it passed.
pub fn run() -> bool {
    let (Some(kernel), None) = (kernel(), obstacle()) else {
        let why = obstacle().unwrap_or("needs an unpacked Debian cloud kernel: examples/install-deps.sh");
        let may_be = std::env::var_os("CI").is_none() || !cfg!(target_arch = "x86_64");
        assert!(may_be, "{NAME} may not be skipped on CI: {why}");
        println!("skipped {NAME}: {why}");
        return true;
    };
    let place = tempfile::tempdir().expect("a directory");
    let image = file_system(place.path(), &kernel);
    let mut machine = Command::new("qemu-system-x86_64");
    machine.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "1280", "-nographic", "-no-reboot"]);
    machine.args(["-nodefaults", "-serial", "stdio", "-kernel"]).arg(&kernel.image).arg("-initrd").arg(&image);
    machine.args(["-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=all"]);
    let machine = machine.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
    judge(watch(machine.expect("a machine")))
}

struct Kernel {
    image: PathBuf,
    modules: PathBuf,
}

fn kernel() -> Option<Kernel> {
    let said = std::env::var_os(KERNEL).map(PathBuf::from);
    let places = said.into_iter().chain(KERNELS.map(PathBuf::from));
    places.into_iter().find_map(|place| {
        let images = fs::read_dir(place.join("boot")).ok()?.flatten().map(|entry| entry.path());
        images.into_iter().find_map(|image| {
            let version = image.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned();
            let modules = place.join("lib/modules").join(version).join("kernel");
            let is_whole = MODULES.iter().all(|module| modules.join(format!("{module}.ko")).is_file());
            is_whole.then_some(Kernel { image, modules })
        })
    })
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

/// Makes the initial file system.
fn file_system(place: &Path, kernel: &Kernel) -> PathBuf {
    let root = place.join("root");
    for folder in ["bin", "t", "lib", "lib64", "etc", "mods", "new", "dev"] {
        fs::create_dir_all(root.join(folder)).expect("a directory");
    }
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox");
    for applet in ["sh", "mount", "cp", "mkdir", "switch_root", "insmod", "ip", "poweroff", "hostname", "echo", "cat"] {
        symlink("busybox", root.join("bin").join(applet)).expect("an applet");
    }
    let own = std::env::current_exe().expect("this program");
    let shim = ground::shim().expect("a shim");
    for (from, name) in [(&own, "test"), (&shim, "berth-shim")] {
        let to = root.join("t").join(name);
        ground::copy_stripped(from, &to);
        for library in libraries(from) {
            let to = root.join(library.strip_prefix("/").expect("a whole path"));
            fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
            fs::copy(&library, to).expect("a library");
        }
    }
    for module in MODULES {
        let name = module.rsplit('/').next().expect("a name");
        fs::copy(kernel.modules.join(format!("{module}.ko")), root.join("mods").join(format!("{name}.ko")))
            .expect(name);
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").expect("written");
    for (name, text) in [("init", FIRST.to_owned()), ("second", second())] {
        fs::write(root.join(name), text).expect("written");
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o755)).expect("a program");
    }
    let image = place.join("initrd");
    let pack = "find . | busybox cpio -o -H newc 2>/dev/null | gzip -1 > ../initrd";
    let packed = Command::new("sh").args(["-c", pack]).current_dir(&root).status().expect("a shell");
    assert!(packed.success());
    image
}

/// The libraries a program is linked with; none where it is static.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let told = Command::new("ldd").arg(program).output().map(|told| told.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&told).into_owned();
    let words = text.split_whitespace().filter(|word| word.starts_with('/'));
    words.map(PathBuf::from).collect()
}

/// Process 1 on the real file system.
fn second() -> String {
    let modules = MODULES.map(|module| format!("insmod /mods/{}.ko", module.rsplit('/').next().unwrap_or(module)));
    let names = v2::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" ");
    format!(
        "#!/bin/sh
export PATH=/bin RUST_BACKTRACE=0
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts; mount -t tmpfs shm /dev/shm; mount -t devpts pts /dev/pts
mount -t tmpfs run /run; mount -t tmpfs tmp /tmp; mount -t cgroup2 cgroup /sys/fs/cgroup
{}
ip link set lo up; hostname unified
/t/test inside {names} 2>&1
echo '{END}'; poweroff -f
",
        modules.join("\n")
    )
}

/// What the machine says until it goes down, or is ended.
fn watch(mut machine: Child) -> Vec<String> {
    let (said, done) = (machine.stdout.take().expect("its console"), Arc::new(AtomicBool::new(false)));
    let is_done = done.clone();
    let machine = thread::spawn(move || {
        let begun = Instant::now();
        while !is_done.load(Ordering::Relaxed) && begun.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(100));
        }
        let _ = machine.kill();
        let _ = machine.wait();
    });
    let mut lines = Vec::new();
    for line in BufReader::new(said).split(b'\n').map_while(Result::ok) {
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

/// Whether every test passed, by what the machine said.
fn judge(lines: Vec<String>) -> bool {
    let has = |name: &str| lines.iter().any(|line| line.ends_with(&format!("test {name} ... ok")));
    let failed: Vec<&str> = v2::ALL.iter().map(|(name, _)| *name).filter(|name| !has(name)).collect();
    for (name, _) in v2::ALL {
        println!("test unified::{name} ... {}", if failed.contains(name) { "FAILED" } else { "ok" });
    }
    if !failed.is_empty() {
        println!("--- what the machine said\n{}\n---", lines.join("\n"));
    }
    failed.is_empty()
}
