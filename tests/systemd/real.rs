//! A virtual machine that is run by a real systemd, copied from this one. What runs there is in `inside.rs`.

use std::{path::Path, time::Duration};

use crate::{
    inside,
    machine::{self, Root},
};

/// The machine is not let run for longer.
const LIMIT: Duration = Duration::from_secs(300);
const SYSTEMD: &str = "/usr/lib/systemd/systemd";
const SYSTEMCTL: &str = "/bin/systemctl";

const BUS: &str = "/usr/bin/dbus-daemon";

/// Nothing but a bus and our tests.
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
/// Everybody there is root.
const DBUS_CONFIG: &str = "<busconfig><type>system</type><listen>unix:path=/run/dbus/system_bus_socket</listen>
<auth>EXTERNAL</auth><policy context=\"default\"><allow send_destination=\"*\"/><allow receive_sender=\"*\"/><allow own=\"*\"/>
<allow user=\"*\"/></policy></busconfig>
";
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

#[test]
fn a_machine_that_systemd_runs() {
    const NAME: &str = "a_machine_that_systemd_runs";
    let kernel = match machine::kernel() {
        Ok(_) if !Path::new(SYSTEMD).exists() => return machine::skip(NAME, "needs systemd"),
        Ok(_) if !Path::new(BUS).exists() => return machine::skip(NAME, "needs dbus-daemon"),
        Ok(kernel) => kernel,
        Err(why) => return machine::skip(NAME, why),
    };
    let place = tempfile::tempdir().expect("a directory");
    let root = Root::new(place.path(), &kernel);
    root.program(&std::env::current_exe().expect("this program"), "t/test");
    for name in ["berth", "berth-shim"] {
        root.program(&machine::beside(name).unwrap_or_else(|| panic!("{name} was not built")), &format!("t/{name}"));
    }
    root.program(Path::new(SYSTEMD), &SYSTEMD[1..]);
    root.program(Path::new(SYSTEMCTL), &SYSTEMCTL[1..]);
    root.program(Path::new(BUS), &BUS[1..]);
    for (name, text) in [
        ("systemd/system/dbus.socket", DBUS_SOCKET),
        ("systemd/system/dbus.service", DBUS_SERVICE),
        ("dbus.conf", DBUS_CONFIG),
    ] {
        root.file(&format!("etc/{name}"), text);
    }
    root.file("etc/os-release", "ID=tests\n");
    root.file("etc/machine-id", "");
    root.file("etc/systemd/system/tests.target", TARGET);
    root.file("etc/systemd/system/tests.service", SERVICE);
    inside::lay_down(&root);
    let (names, end) = (inside::NAMES.join(" "), machine::END);
    root.file("t/tests", &format!("/t/test --ignored --exact {names} 2>&1\necho '{end}'; poweroff -f\n"));
    let second = format!("ip link set lo up; hostname slices\nexec {SYSTEMD} --unit=tests.target --log-target=kmsg\n");
    let image = root.pack(&second);
    let attempt = || machine::failed(inside::NAMES, &machine::run(&kernel, &image, LIMIT));
    // Under emulation a first attempt may fail for no reason of ours; what was said is shown.
    let failed = Some(attempt()).filter(|failed| failed.is_empty()).unwrap_or_else(attempt);
    assert!(failed.is_empty(), "{failed:?}");
}
