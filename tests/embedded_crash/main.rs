//! What is left when daemon or shim are killed: at each step of a pod's life, and under containers that misbehave.
//!
//! Needs root; says so where it is skipped. This program is also the daemon it kills, and process 1 of the machine it runs
//! on: hence no test harness. That machine has process, mount and network namespaces of its own, so that nothing is left
//! whatever fails; only control groups are the host's, and are removed at the end.
//!
//! ```text
//!  cargo test ─► machine (namespaces) ─► init (reaps) ─► inside (tests) ─► daemon ─► shims
//! ```

#[path = "../kit/mod.rs"]
mod kit;

mod daemon;
mod ground;
mod inputs;
mod power;
mod registry;
mod rig;
mod shims;
mod steps;
mod unified;
mod upgrade;
mod v2;

use std::{panic::catch_unwind, path::Path, process::ExitCode, time::Duration};

/// A test, by its name.
pub type Test = (&'static str, fn());

/// Makes the table of a file's tests, by their names and with a limit each.
#[macro_export]
macro_rules! tests {
    ($($name:ident)*) => {
        /// All tests by their names.
        pub const ALL: &[$crate::Test] = &[$((stringify!($name), || $crate::run($name))),*];
    };
}

/// No test takes that long.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs a test on a daemon of its own.
pub fn run<F: Future<Output = ()>>(test: impl FnOnce(rig::Rig) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let rig = runtime.block_on(rig::Rig::start());
    runtime.block_on(async { tokio::time::timeout(LIMIT, test(rig)).await.expect("the test hangs") });
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (first, rest) = arguments.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
    match first {
        "daemon" => daemon::run(Path::new(&rest[0])),
        "machine" => ground::machine(rest),
        "init" => ground::init(rest),
        "inside" => inside(rest),
        _ => outside(&arguments),
    }
}

/// All that run on the machine that is made of namespaces.
fn all() -> impl Iterator<Item = &'static Test> {
    steps::ALL.iter().chain(shims::ALL).chain(upgrade::ALL).chain(power::ALL).chain(inputs::ALL)
}

fn outside(arguments: &[String]) -> ExitCode {
    if arguments.iter().any(|argument| argument == "--list") {
        all().for_each(|(name, _)| println!("{name}: test"));
        println!("{}: test", unified::NAME);
        return ExitCode::SUCCESS;
    }
    let wanted: Vec<String> = arguments.iter().filter(|argument| !argument.starts_with('-')).cloned().collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| name.contains(w.as_str()));
    let mut verdict = true;
    let names: Vec<String> = all().map(|(name, _)| (*name).to_owned()).filter(|name| is_wanted(name)).collect();
    if !names.is_empty() {
        match ground::obstacle() {
            Some(why) => {
                assert!(std::env::var_os("CI").is_none(), "may not be skipped on CI: {why}");
                names.iter().for_each(|name| println!("skipped {name}: {why}"));
            }
            None => verdict &= ground::run_machine(&names),
        }
    }
    if is_wanted(unified::NAME) {
        verdict &= unified::run();
    }
    if verdict { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn inside(wanted: &[String]) -> ExitCode {
    let mut failed = 0;
    for (name, test) in all().chain(v2::ALL).filter(|(name, _)| wanted.iter().any(|w| w == name)) {
        let verdict = if catch_unwind(test).is_ok() { "ok" } else { "FAILED" };
        println!("test {name} ... {verdict}");
        failed += u32::from(verdict != "ok");
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
