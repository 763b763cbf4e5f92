//! Fuzz smoke tests: every fuzz target on its corpus and on seeded mutations, about a second each.
//!
//! A failing input is printed and saved, with the command to run it again. `FUZZ_SMOKE_SECONDS` lengthens the run,
//! `FUZZ_SMOKE_SEED` varies it; the coverage-guided fuzzer is `make fuzz TARGET=…`.

mod mutations;
mod targets;

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::Duration,
};

use mutations::{Dice, grow, mutate};
use nix::time::{ClockId, clock_gettime};
use targets::{TARGETS, Target};

/// Maximum number of inputs per second of run time.
const MOST: u64 = 200_000;
/// Size of the inputs that reveal superlinear cost, in bytes.
const LARGE: usize = 128 << 10;
/// CPU time limit of one input, in an unoptimized build.
const SLOW: Duration = Duration::from_secs(4);
/// Wall time after which an input counts as hanging, however busy the machine is.
const HANGS: Duration = Duration::from_secs(120);
/// Large inputs per seed.
const LARGE_PER_SEED: usize = 6;
/// Stack size of the agent's parsing threads, in bytes.
const STACK: usize = 2 << 20;

macro_rules! smoke {
    ($($name:ident)*) => {
        const RUN: &[&str] = &[$(stringify!($name)),*];
        $(#[test]
        fn $name() {
            smoke(stringify!($name));
        })*
    };
}

smoke! {
    allocate_response cgroup_files command_line containerd_event cpu_manager_state cpu_set cri_endpoint cri_status
    device_checkpoint device_list docker_config dra_checkpoint dra_health_state env_file expansion field_path
    filter_profile go_duration host_names image_pattern image_reference image_users kernel_log kubelet_config
    kubelet_dropin layer_entries log_cri log_docker log_filter log_query manifest_file manifest_http
    memory_manager_state mount_table plugin_config plugin_response pull_record quantity resolv_conf resource_state
    shim_exit_record shim_message shim_output spdy_frames websocket_tunnel
}

fn fuzz_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

#[test]
fn every_target_is_run_and_has_a_program_and_a_corpus() {
    let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, RUN);
    let manifest = fs::read_to_string(fuzz_folder().join("Cargo.toml")).expect("the fuzz crate");
    assert_eq!(manifest.matches("[[bin]]").count(), names.len(), "programs without a target");
    for name in names {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is no program of fuzz/Cargo.toml");
        let program = fuzz_folder().join(format!("fuzz_targets/{name}.rs"));
        assert!(program.is_file(), "{} is missing", program.display());
        assert!(!corpus(name).is_empty(), "{name} has no corpus");
    }
}

#[test]
fn a_failing_input_is_reported() {
    fn bad(data: &[u8]) {
        assert!(data != b"x");
    }
    let found = run(Job { name: "self-check", target: bad, inputs: Box::new(|| Some(b"x".to_vec())) });
    let Failure { what, input } = found.expect_err("found");
    assert_eq!((what.as_str(), input.as_slice()), ("it panics", &b"x"[..]));
    assert_eq!(from_hex(&hex(b"\x00\xffa")), b"\x00\xffa");
}

/// Checked-in inputs of a target, sorted by file name.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = fuzz_folder().join("corpus").join(name);
    let mut files: Vec<PathBuf> =
        fs::read_dir(&folder).into_iter().flatten().map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    files.iter().map(|path| fs::read(path).expect("readable")).collect()
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// Inputs in order; `None` ends the run.
type Inputs = Box<dyn FnMut() -> Option<Vec<u8>> + Send>;

struct Job {
    name: &'static str,
    target: Target,
    inputs: Inputs,
}

struct Failure {
    what: String,
    input: Vec<u8>,
}

fn smoke(name: &'static str) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a known target");
    let inputs: Inputs = match std::env::var("FUZZ_REPLAY") {
        Ok(wanted) => {
            let mut once = Some(wanted.strip_prefix('@').map_or_else(|| from_hex(&wanted), |p| fs::read(p).expect(p)));
            Box::new(move || once.take())
        }
        Err(_) => planned(name),
    };
    if let Err(Failure { what, input }) = run(Job { name, target: *target, inputs }) {
        let kept = keep(name, &input);
        let shown = if input.len() <= 1024 { hex(&input) } else { format!("@{}", kept.display()) };
        panic!(
            "{name}: {what} on {} bytes, kept in {}\nagain: FUZZ_REPLAY={shown} cargo test --test fuzz_smoke {name}",
            input.len(),
            kept.display()
        );
    }
}

/// The corpus, large inputs derived from it, then mutations until time or number is exhausted.
fn planned(name: &'static str) -> Inputs {
    let seconds = setting("FUZZ_SMOKE_SECONDS", 1);
    let mut dice = Dice::new(setting("FUZZ_SMOKE_SEED", 1), name);
    let seeds = corpus(name);
    let mut first = seeds.clone();
    first.push(Vec::new());
    for seed in &seeds {
        first.extend((0..LARGE_PER_SEED as u64 * seconds).map(|_| grow(&mut dice, seed, LARGE)));
    }
    let mut first = first.into_iter();
    let (mut left, mut began) = (MOST * seconds, None);
    Box::new(move || {
        if let Some(input) = first.next() {
            return Some(input);
        }
        left = left.checked_sub(1)?;
        let began = *began.get_or_insert_with(used);
        let is_over = used() - began > Duration::from_secs(seconds);
        (!is_over).then(|| mutate(&mut dice, &seeds))
    })
}

/// CPU time of this thread: other tests do not count.
fn used() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has this clock").into()
}

/// Runs a target on its own thread, so that a hang can be reported.
fn run(job: Job) -> Result<(), Failure> {
    let Job { name, target, mut inputs } = job;
    let current = Arc::new(Mutex::new(Vec::new()));
    let (sender, verdicts) = mpsc::channel();
    let now = current.clone();
    let worker = move || {
        while let Some(input) = inputs() {
            input.clone_into(&mut now.lock().unwrap_or_else(PoisonError::into_inner));
            // A stack overflow aborts the process: the file contains the input.
            let trace = (input.len() >= LARGE / 2).then(|| keep(name, &input));
            let before = used();
            let outcome = catch_unwind(AssertUnwindSafe(|| target(&input)));
            let took = used().saturating_sub(before);
            if outcome.is_ok() && took <= SLOW {
                trace.into_iter().for_each(|path| drop(fs::remove_file(path)));
            }
            let verdict = match outcome {
                Err(_) => Err("it panics".to_owned()),
                Ok(()) if took > SLOW => Err(format!("it takes {took:?}")),
                Ok(()) => Ok(()),
            };
            let is_bad = verdict.is_err();
            if sender.send(verdict).is_err() || is_bad {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(worker).expect("a thread");
    let fail = |what| {
        let input = current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Err(Failure { what, input })
    };
    let mut tried = 0_u64;
    loop {
        match verdicts.recv_timeout(HANGS) {
            Ok(Ok(())) => tried += 1,
            Ok(Err(what)) => return fail(what),
            Err(mpsc::RecvTimeoutError::Timeout) => return fail("it hangs".to_owned()),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    thread.join().expect("making inputs does not fail");
    println!("{name}: {tried} inputs");
    Ok(())
}

/// Writes an input to the build directory; returns its path.
fn keep(name: &str, input: &[u8]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz_smoke");
    fs::create_dir_all(&folder).expect("the build folder is writable");
    let path = folder.join(format!("{name}.input"));
    fs::write(&path, input).expect("the build folder is writable");
    path
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digit = |b: u8| char::from(b).to_digit(16).and_then(|d| u8::try_from(d).ok()).expect("hex digits");
    text.as_bytes().chunks(2).map(|pair| pair.iter().fold(0, |byte, b| byte << 4 | digit(*b))).collect()
}
