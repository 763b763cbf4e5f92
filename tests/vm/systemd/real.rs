//! Boots a virtual machine with a real systemd, copied from this machine.
//!
//! Its checks are in `inside.rs`.

use std::time::Duration;

use crate::systemd::inside;
use berth_testkit::{
    machine::{self, Root},
    machine_systemd,
};

/// Timeout of the virtual machine.
const LIMIT: Duration = Duration::from_secs(300);

#[test]
#[ignore = "takes a minute of emulation: make test-vm"]
fn a_machine_that_systemd_runs() {
    const NAME: &str = "a_machine_that_systemd_runs";
    let kernel = match machine::kernel() {
        Ok(kernel) => kernel,
        Err(why) => return machine::skip(NAME, why),
    };
    if let Some(why) = machine_systemd::obstacle() {
        return machine::skip(NAME, why);
    }
    let place = tempfile::tempdir().expect("a directory");
    let root = Root::new(place.path());
    let (names, end) = (inside::NAMES.join(" "), machine::END);
    let tests = format!("/t/test --ignored --exact {names} 2>&1\necho '{end}'; poweroff -f\n");
    machine_systemd::lay_down(&root, &tests);
    inside::lay_down(&root);
    let image = root.pack(&kernel, &machine_systemd::second("hostname slices"));
    let failed = machine::failed(inside::NAMES, &machine::run(&kernel, &image, LIMIT));
    assert!(failed.is_empty(), "{failed:?}");
}
