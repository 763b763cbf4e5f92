//! Deterministic simulation of the agent under faults: real components, one thread, a paused clock.
//!
//! Engine, runtime manager, images, PLEG, status, and mux run against a scripted runtime that fails, hangs, loses
//! state, and reboots as a seed determines.
//!
//! ```text
//!  seed ─► profile (which faults) ─► script (≈ 30 events) ─► heal ─► settled? quiet? nothing broken?
//! ```
//!
//! `BERTH_SIM_SEEDS=n` runs that many seeds, from `BERTH_SIM_FROM=n` on; `BERTH_SIM_SEED=n` replays one with a full
//! trace. The same seed is the same run: time is virtual, and all randomness derives from it (see [`seeded_random`]). The
//! seeds are split into four tests, for two processors.

mod convergence_check;
mod invariants;
mod profile;
mod run_state;
mod script;
#[allow(unsafe_code, reason = "chance can only be taken from a process by answering getrandom(2) for it")]
mod seeded_random;
mod time_limit;
mod trace;

use std::{
    collections::BTreeMap,
    env,
    panic::{self, AssertUnwindSafe},
    process::Command,
    sync::{Mutex, PoisonError, mpsc},
    time::Duration,
};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::{TimeVal, TimeValLike},
};
use run_state::RunState;

/// Default number of seeds.
const SEEDS: u64 = 1000;
/// Number of tests that share the seeds.
const SHARDS: u64 = 4;
/// A process runs one seed at a time, also where its tests are threads.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
/// The first seeds, which together initialize everything that exists once per process.
const MAKERS: u64 = 8;
/// The seed whose fingerprint is compared between a run of its own and one among others.
const COMPARED: u64 = 19;

/// CPU time after which a run is aborted: a task is busy without waiting.
const ENDLESS: Duration = Duration::from_secs(30);
/// Waits of one second after which a run is aborted: no task makes progress. Many, because the machine may be busy; and
/// counted instead of timed, because the process may be stopped.
const STUCK: u32 = 600;

/// Result of a run.
struct RunResult {
    /// Hash of everything that happened.
    fingerprint: u64,
    /// Time from healing to the desired state.
    settled_in: Duration,
    /// Time limit for it.
    granted: Duration,
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

/// Runs one seed, on its own thread and runtime.
fn run(seed: u64, replay: bool) -> Result<RunResult, String> {
    let (ended, end) = mpsc::channel();
    let thread = std::thread::Builder::new().name(format!("seed {seed}")).spawn(move || {
        seeded_random::seed(seed);
        let runtime = runtime();
        let _log = replay.then(trace::to_stdout);
        let life = AssertUnwindSafe(|| runtime.block_on(RunState::live(seed)));
        let done = panic::catch_unwind(life).unwrap_or_else(|_| Err("a panic, see above".to_owned()));
        drop(runtime);
        // The receiver may have given up.
        let _ = ended.send(done);
    });
    thread.expect("a thread");
    let used = processor_time();
    for _ in 0..STUCK {
        match end.recv_timeout(Duration::from_secs(1)) {
            Ok(done) => return done,
            Err(_) if processor_time() - used > ENDLESS => {
                return Err(format!("virtual time stands still: no end within {ENDLESS:?} of work"));
            }
            Err(_) => {}
        }
    }
    Err("nobody does anything any more".to_owned())
}

/// CPU time of this process so far; it runs one seed at a time.
fn processor_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("asking for oneself is allowed");
    let micros = |time: TimeVal| Duration::from_micros(u64::try_from(time.num_microseconds()).expect("not negative"));
    micros(usage.user_time()) + micros(usage.system_time())
}

/// Brings this process into the state that an ordinary run has before a seed: the first seeds have initialized
/// everything that exists once per process, and tokio has drawn as often.
fn catch_up(seed: u64) {
    for earlier in 0..seed.min(MAKERS) {
        // The result is not relevant here.
        let _ = run(earlier, false);
    }
    seeded_random::skip(seed.saturating_sub(MAKERS), || drop(runtime()));
}

/// Draws equally many random numbers for every seed.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).max_blocking_threads(1).build().expect("a runtime");
    runtime.block_on(async { tokio::task::spawn_blocking(|| {}).await.expect("a thread for files") });
    runtime
}

#[test]
fn pods_survive_random_faults() {
    if let Some(seed) = number("BERTH_SIM_SEED") {
        catch_up(seed);
        let done = run(seed, true).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        println!("fingerprint of {seed}: {:016x}", done.fingerprint);
        return;
    }
    survive(0);
}

#[test]
fn pods_survive_random_faults_second_quarter() {
    survive(1);
}

#[test]
fn pods_survive_random_faults_third_quarter() {
    survive(2);
}

#[test]
fn pods_survive_random_faults_fourth_quarter() {
    survive(3);
}

/// Runs the seeds of a shard.
fn survive(shard: u64) {
    if number("BERTH_SIM_SEED").is_some() {
        return;
    }
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let shown = number("BERTH_SIM_FINGERPRINT");
    let (mut failures, mut slowest) = (BTreeMap::new(), (Duration::ZERO, 0, Duration::ZERO));
    let all = number("BERTH_SIM_SEEDS").unwrap_or(SEEDS);
    let first = number("BERTH_SIM_FROM").unwrap_or_default();
    let (from, to) = (first + all * shard / SHARDS, first + all * (shard + 1) / SHARDS);
    let seeds = to - from;
    catch_up(from);
    for seed in from..to {
        match run(seed, false) {
            Ok(done) => {
                slowest = slowest.max((done.settled_in, seed, done.granted));
                if shown == Some(seed) {
                    println!("fingerprint of {seed}: {:016x}", done.fingerprint);
                }
            }
            Err(error) => {
                let text = if failures.is_empty() { error.clone() } else { String::new() };
                println!("seed {seed} failed; replay it with BERTH_SIM_SEED={seed}\n{text}");
                failures.insert(seed, error);
            }
        }
    }
    println!("{seeds} seeds; the slowest to settle was {}, in {:?} of {:?}", slowest.1, slowest.0, slowest.2);
    let list: Vec<String> =
        failures.iter().map(|(seed, error)| format!("{seed}: {}", error.lines().next().unwrap_or_default())).collect();
    assert!(
        list.is_empty(),
        "{} of {seeds} seeds failed; replay one with\n  BERTH_SIM_SEED=<seed> cargo test --test simulation -- --nocapture\n{}",
        list.len(),
        list.join("\n")
    );
}

#[test]
fn a_seed_is_the_same_run_wherever_it_is_run() {
    let fingerprint = |variables: &[(&str, u64)]| {
        let mut command = Command::new(env::current_exe().expect("this program"));
        command.args(["pods_survive_random_faults", "--exact", "--nocapture"]);
        for name in ["BERTH_SIM_SEED", "BERTH_SIM_SEEDS", "BERTH_SIM_FROM", "BERTH_SIM_FINGERPRINT"] {
            command.env_remove(name);
        }
        command.envs(variables.iter().map(|(name, value)| (name, value.to_string())));
        let output = command.output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().find(|line| line.starts_with("fingerprint")).unwrap_or(&text).to_owned()
    };
    let alone = fingerprint(&[("BERTH_SIM_SEED", COMPARED)]);
    let among = fingerprint(&[("BERTH_SIM_SEEDS", SHARDS * (COMPARED + 1)), ("BERTH_SIM_FINGERPRINT", COMPARED)]);
    assert_eq!(alone, among);
}
