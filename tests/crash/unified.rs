//! The runtime on a cgroup v2 machine whose kernel has no packet filter.
//!
//! A virtual machine of the test kit with this program and the shim; its tests are in `v2.rs`. A skipped run reports
//! so.

use std::time::Duration;

use crate::{test_machine, v2};
use berth_testkit::machine::{self, END, Root};

/// Name of the test.
pub const NAME: &str = "the_runtime_on_a_machine_of_the_unified_hierarchy";
/// Timeout of the virtual machine.
const LIMIT: Duration = Duration::from_secs(240);

/// Runs the test; returns whether it passed or was skipped.
pub fn run() -> bool {
    let kernel = match machine::kernel() {
        Ok(kernel) => kernel,
        Err(why) => {
            machine::skip(NAME, why);
            return true;
        }
    };
    let place = tempfile::tempdir().expect("a directory");
    let root = Root::new(place.path());
    root.program(&std::env::current_exe().expect("this program"), "t/test");
    root.program(&test_machine::shim().expect("a shim"), "t/berth-shim");
    let names: Vec<&str> = v2::ALL.iter().map(|(name, _)| *name).collect();
    let tests = names.join(" ");
    let image = root.pack(
        &kernel,
        &format!("ip link set lo up; hostname unified\n/t/test inside {tests} 2>&1\necho '{END}'; poweroff -f\n"),
    );
    let lines = machine::run(&kernel, &image, LIMIT);
    let failed = machine::failed(names.iter().copied(), &lines);
    for name in names {
        println!("test unified::{name} ... {}", if failed.contains(&name) { "FAILED" } else { "ok" });
    }
    failed.is_empty()
}
