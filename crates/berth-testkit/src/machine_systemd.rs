//! Virtual machine with a real systemd copied from the host: D-Bus, and the tests as one service.

use std::path::Path;

use super::{machine::Root, programs};

/// systemd, copied from the host.
pub const SYSTEMD: &str = "/usr/lib/systemd/systemd";
const SYSTEMCTL: &str = "/bin/systemctl";
const BUS: &str = "/usr/bin/dbus-daemon";
const LOGIND: &str = "/lib/systemd/systemd-logind";
const SHUTDOWN: &str = "/lib/systemd/systemd-shutdown";
/// Creates file systems in the machine.
pub const MKE2FS: &str = "/usr/sbin/mke2fs";
/// Debian's own units: ordering of start and stop, and logind, which the agent calls.
const UNITS: [&str; 21] = [
    "basic.target",
    "dbus.service", // overridden by ours, but logind's unit requires this file
    "dbus.socket",
    "final.target",
    "local-fs-pre.target",
    "local-fs.target",
    "multi-user.target",
    "network-online.target",
    "network.target",
    "paths.target",
    "poweroff.target",
    "shutdown.target",
    "slices.target",
    "sockets.target",
    "swap.target",
    "sysinit.target",
    "systemd-logind.service",
    "systemd-poweroff.service",
    "timers.target",
    "umount.target",
    "user.slice",
];

/// Only D-Bus and the tests.
const TARGET: &str = "[Unit]\nDefaultDependencies=no\nRequires=tests.service\n";
const DBUS_SOCKET: &str = "[Unit]\nDefaultDependencies=no\n[Socket]\nListenStream=/run/dbus/system_bus_socket\n";
const DBUS_SERVICE: &str = "[Unit]
DefaultDependencies=no
Requires=dbus.socket
After=dbus.socket
[Service]
Type=notify
ExecStart=/usr/bin/dbus-daemon --config-file=/etc/dbus.conf --address=systemd: --nofork --nopidfile
";
/// All processes in the machine are root.
const DBUS_CONFIG: &str = "<busconfig><type>system</type><listen>unix:path=/run/dbus/system_bus_socket</listen>
<auth>EXTERNAL</auth><policy context=\"default\"><allow send_destination=\"*\"/><allow receive_sender=\"*\"/><allow own=\"*\"/>
<allow user=\"*\"/></policy></busconfig>
";
/// Without default dependencies the service is not stopped before the others at shutdown, so that it can observe
/// them.
const SERVICE: &str = "[Unit]
DefaultDependencies=no
Requires=dbus.service
After=dbus.service
[Service]
Type=oneshot
Environment=PATH=/bin RUST_BACKTRACE=0 RUST_TEST_THREADS=1 BERTH_INSIDE=1
ExecStart=/bin/sh /t/tests
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
TTYVTDisallocate=no
KillMode=process
";

/// Reason why no systemd machine can run here; `None` if only a kernel is needed.
pub fn obstacle() -> Option<&'static str> {
    if !Path::new(SYSTEMD).exists() {
        return Some("needs systemd");
    }
    (!Path::new(BUS).exists()).then_some("needs dbus-daemon")
}

/// Reason why no machine with logind shutdown can run here; `None` if only a kernel is needed.
pub fn obstacle_of_node() -> Option<&'static str> {
    if let Some(why) = obstacle() {
        return Some(why);
    }
    if !Path::new(LOGIND).exists() {
        return Some("needs systemd-logind");
    }
    (!Path::new(MKE2FS).exists()).then_some("needs mke2fs (e2fsprogs)")
}

/// Adds systemd, D-Bus, logind, and units to the base image, as far as the host has them.
pub(super) fn lay_down_base(root: &Root) {
    for program in [SYSTEMD, SYSTEMCTL, BUS, LOGIND, SHUTDOWN, MKE2FS] {
        if Path::new(program).exists() {
            root.program(Path::new(program), program.trim_start_matches('/'));
        }
    }
    for unit in UNITS.map(|unit| format!("/lib/systemd/system/{unit}")) {
        if Path::new(&unit).exists() {
            root.same(&unit);
        }
    }
    for (name, text) in [
        ("systemd/system/dbus.socket", DBUS_SOCKET),
        ("systemd/system/dbus.service", DBUS_SERVICE),
        ("systemd/system/tests.target", TARGET),
        ("systemd/system/tests.service", SERVICE),
        ("dbus.conf", DBUS_CONFIG),
        ("os-release", "ID=tests\n"),
        ("machine-id", ""),
        ("resolv.conf", "nameserver 127.0.0.1\n"),
        ("hosts", "127.0.0.1 localhost\n"),
    ] {
        root.file(&format!("etc/{name}"), text);
    }
}

/// Adds this test program and ours; `tests` is the shell script of the tests service.
pub fn lay_down(root: &Root, tests: &str) {
    root.program(&std::env::current_exe().expect("failed to find the test binary"), "t/test");
    for (name, path) in [("berth", programs::berth()), ("berth-shim", programs::shim())] {
        root.program(&path, &format!("t/{name}"));
    }
    root.file("t/tests", tests);
}

/// Script of PID 1 on the real root file system; runs `before`, then systemd.
pub fn second(before: &str) -> String {
    format!("ip link set lo up; {before}\nexec {SYSTEMD} --unit=tests.target --log-target=kmsg\n")
}
