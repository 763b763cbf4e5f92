//! Crash tests: kills the daemon or a shim at each step of a pod's life, and under hostile containers.
//!
//! Each test checks what is left behind. Needs root; a skipped test reports so. This program is also the daemon and the
//! shim that it kills, and process 1 of the machine that it runs on, so it has a `main` of its own, with libtest-mimic
//! as its harness. Each test has a machine with its own process, mount, and network namespaces, so that a failed test
//! leaves nothing behind; only cgroups are the host's, and they are removed at the end.
//!
//! ```text
//!  test ─► machine (namespaces) ─► init (reaps) ─► inside (the test) ─► daemon ─► shims
//! ```

#![allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves")]

mod daemon;
mod fixture;
mod hostile_containers;
mod power_cuts;
mod registry;
mod shim;
mod shims;
mod steps;
mod test_machine;
mod unified;
mod upgrade;
mod v2;

use std::{panic::catch_unwind, path::Path, process::ExitCode, time::Duration};

use libtest_mimic::{Arguments, Failed, Trial};

/// Name and function of a test.
pub type Test = (&'static str, fn());

/// Creates the table of a file's tests: name, and function with a timeout.
#[macro_export]
macro_rules! tests {
    ($($name:ident)*) => {
        /// All tests of this file.
        pub const ALL: &[$crate::Test] = &[$((stringify!($name), || $crate::run($name))),*];
    };
}

/// Timeout of a test.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs a test with its own daemon.
pub fn run<F: Future<Output = ()>>(test: impl FnOnce(fixture::Fixture) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let rig = runtime.block_on(fixture::Fixture::start());
    runtime.block_on(async { tokio::time::timeout(LIMIT, test(rig)).await.expect("the test hangs") });
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (first, rest) = arguments.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
    match first {
        "daemon" => daemon::run(Path::new(&rest[0])),
        "machine" => test_machine::machine(rest),
        "init" => test_machine::init(rest),
        "inside" => inside(rest),
        folder if folder.starts_with('/') => shim::serve(Path::new(folder)),
        _ => harness(),
    }
}

/// Tests that need a machine made of namespaces, by module.
const ON_A_MACHINE: [(&str, &[Test]); 5] = [
    ("steps", steps::ALL),
    ("shims", shims::ALL),
    ("upgrade", upgrade::ALL),
    ("power_cuts", power_cuts::ALL),
    ("hostile_containers", hostile_containers::ALL),
];

fn harness() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Shims and machines of several tests would compete for CPU time within their timeouts; nextest sets the
    // parallelism.
    arguments.test_threads.get_or_insert(1);
    let on_machines = ON_A_MACHINE.iter().flat_map(|(module, tests)| tests.iter().map(move |test| (module, test)));
    let mut trials: Vec<Trial> = on_machines
        .map(|(module, (name, _))| Trial::test(format!("{module}::{name}"), || on_a_machine(name)))
        .collect();
    trials.extend(shim::trials());
    let name = format!("unified::{}", unified::NAME);
    trials.push(Trial::test(name, || verdict(unified::run())).with_ignored_flag(true));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Runs a test on a machine of its own.
fn on_a_machine(name: &str) -> Result<(), Failed> {
    if let Some(why) = test_machine::obstacle() {
        assert!(std::env::var_os("CI").is_none(), "{name} may not be skipped on CI: {why}");
        println!("skipped {name}: {why}");
        return Ok(());
    }
    verdict(test_machine::run_machine(&[name.to_owned()]))
}

fn verdict(has_passed: bool) -> Result<(), Failed> {
    if has_passed { Ok(()) } else { Err(Failed::from("the machine's output above says why")) }
}

fn inside(wanted: &[String]) -> ExitCode {
    let all = ON_A_MACHINE.iter().flat_map(|(_, tests)| *tests).chain(v2::ALL);
    let mut failed = 0;
    for (name, test) in all.filter(|(name, _)| wanted.iter().any(|w| w == name)) {
        let verdict = if catch_unwind(test).is_ok() { "ok" } else { "FAILED" };
        println!("test {name} ... {verdict}");
        failed += u32::from(verdict != "ok");
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
