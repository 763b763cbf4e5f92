//! CPU and heap profiles of this process for `/debug/pprof/`, gzipped `profile.proto`; and the list of its threads.

use std::{
    collections::HashMap,
    fmt::Write as _,
    io::{self, Write as _},
    os::unix::ffi::OsStringExt,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use prost::Message;
use tracing::info;

use super::pprof_encoder::{self, SamplingWindow, StackMemory, Symbol, estimate};
use berth_proto::profile::Profile;
use berth_server::ports::{MemoryView, ProfileError, Profiles};
use berth_sys::{
    cpu_profile::{CpuProfiler, SAMPLES_PER_SECOND, StartError},
    heap_profile::{self, BlockSum, HeapSample, SAMPLE_INTERVAL},
};

/// CPU and heap profiles of this process.
pub struct ProcessProfiles;

#[async_trait]
impl Profiles for ProcessProfiles {
    async fn processor(&self, time: Duration) -> Result<Bytes, ProfileError> {
        let profiler = CpuProfiler::start().map_err(|error| match error {
            StartError::Busy => ProfileError::Busy,
            StartError::Kernel => ProfileError::Failed("failed to create profiling timer".to_owned()),
        })?;
        let start = now();
        tokio::time::sleep(time).await;
        let sampling =
            SamplingWindow { start, duration: nanos(time), period: 1_000_000_000 / i64::from(SAMPLES_PER_SECOND) };
        blocking(move || {
            let stacks = profiler.stacks();
            drop(profiler);
            info!(samples = stacks.len(), "Collected CPU profile");
            gzip(&pprof_encoder::cpu(&stacks, &mappings()?, sampling, symbols))
        })
        .await
    }

    async fn memory(&self, view: MemoryView, time: Option<Duration>) -> Result<Bytes, ProfileError> {
        let start = now();
        let is_first = heap_profile::start().map_err(failed)?;
        let before = match time {
            None => Vec::new(),
            Some(time) => {
                let before = blocking(heap_profile::samples).await?;
                tokio::time::sleep(time).await;
                before
            }
        };
        let duration = time.map_or(0, nanos);
        blocking(move || {
            let after = heap_profile::samples()?;
            info!(stacks = after.len(), "Collected heap profile");
            let sampling =
                SamplingWindow { start, duration, period: i64::try_from(SAMPLE_INTERVAL).unwrap_or(i64::MAX) };
            let comment = comment(is_first && time.is_none());
            let stacks = since(before, after);
            gzip(&pprof_encoder::heap(&stacks, (&mappings()?, sampling), (view, &comment), symbols))
        })
        .await
    }

    fn threads(&self) -> String {
        let mut threads: Vec<(u32, String)> = Vec::new();
        for entry in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            // A thread may have exited meanwhile.
            let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
            if let Some((id, line)) = thread(&stat) {
                threads.push((id, line));
            }
        }
        threads.sort();
        let mut text = format!("threads: {}\n", threads.len());
        threads.iter().for_each(|(_, line)| text.push_str(line));
        text
    }

    fn command_line(&self) -> Bytes {
        let words: Vec<Vec<u8>> = std::env::args_os().map(OsStringExt::into_vec).collect();
        words.join(&0).into()
    }
}

/// Formats a thread: ID, name, state; `None` if `stat` is malformed.
fn thread(stat: &str) -> Option<(u32, String)> {
    let (id, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let state = match rest.chars().next()? {
        'R' => "running",
        'S' => "sleeping",
        'D' => "disk sleep",
        'T' | 't' => "stopped",
        _ => "other",
    };
    let id = id.parse().ok()?;
    let mut line = String::new();
    writeln!(line, "{id} {name} {state}").ok()?;
    Some((id, line))
}

fn comment(is_first: bool) -> String {
    let mut text = format!("one sample per {SAMPLE_INTERVAL} bytes allocated since sampling started");
    if is_first {
        text.push_str("; sampling started with this request, repeat the request");
    }
    text
}

/// Memory that was allocated and freed between two reads of the samples.
fn since(before: Vec<HeapSample>, after: Vec<HeapSample>) -> Vec<StackMemory> {
    let mut before: HashMap<_, _> = before.into_iter().map(|old| (old.frames, (old.allocated, old.live))).collect();
    let growth = |now: BlockSum, then: BlockSum| {
        let total = |sum: BlockSum| estimate(sum.blocks, sum.bytes, SAMPLE_INTERVAL);
        let (now, then) = (total(now), total(then));
        (now.0.saturating_sub(then.0), now.1.saturating_sub(then.1))
    };
    let stacks = after.into_iter().map(|HeapSample { frames, allocated, live }| {
        let (old_allocated, old_live) = before.remove(&frames).unwrap_or_default();
        StackMemory { frames, allocated: growth(allocated, old_allocated), live: growth(live, old_live) }
    });
    stacks.filter(|stack| stack.allocated != (0, 0) || stack.live != (0, 0)).collect()
}

fn now() -> i64 {
    nanos(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

fn failed(error: impl std::fmt::Display) -> ProfileError {
    ProfileError::Failed(error.to_string())
}

/// Runs work that blocks, such as resolving symbols, on a thread for it.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, ProfileError> {
    tokio::task::spawn_blocking(work).await.map_err(failed)?.map_err(failed)
}

fn mappings() -> io::Result<Vec<pprof_encoder::CodeMapping>> {
    Ok(pprof_encoder::mappings(&std::fs::read_to_string("/proc/self/maps")?))
}

fn gzip(profile: &Profile) -> io::Result<Bytes> {
    let mut zip = GzEncoder::new(Vec::new(), Compression::fast());
    zip.write_all(&profile.encode_to_vec())?;
    Ok(zip.finish()?.into())
}

/// Functions at an address; none in a stripped program.
fn symbols(address: u64) -> Vec<Symbol> {
    let mut found = Vec::new();
    // The crate takes every address for a return address and looks before it, which would be the previous function for a
    // sample on a function's first instruction.
    let Ok(address) = usize::try_from(address.saturating_add(1)) else { return found };
    backtrace::resolve(std::ptr::without_provenance_mut(address), |symbol| {
        if let Some(name) = symbol.name() {
            found.push(Symbol {
                // Without the hash that differs between builds.
                function: format!("{name:#}"),
                linkage_name: String::from_utf8_lossy(name.as_bytes()).into_owned(),
                file: symbol.filename().map(|path| path.display().to_string()).unwrap_or_default(),
                line: i64::from(symbol.lineno().unwrap_or(0)),
            });
        }
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_samples_between_the_two_profiles_count() {
        let sample = |stack: u64, allocated: u64, freed: u64| HeapSample {
            frames: vec![stack],
            allocated: BlockSum { blocks: allocated, bytes: allocated << 30 },
            live: BlockSum { blocks: allocated - freed, bytes: (allocated - freed) << 30 },
        };
        let before = vec![sample(1, 3, 1), sample(2, 2, 0)];
        let after = vec![sample(3, 1, 0), sample(2, 2, 0), sample(1, 5, 4)];
        let grown = since(before, after);
        let blocks: Vec<(i64, i64)> = grown.iter().map(|stack| (stack.allocated.0, stack.live.0)).collect();
        assert_eq!(blocks, [(1, 1), (2, -1)]);
    }

    #[test]
    fn the_first_instruction_belongs_to_its_function() {
        #[inline(never)]
        fn first_of_all(of: u64) -> u64 {
            std::hint::black_box(of) + 1
        }
        assert_eq!(first_of_all(1), 2);
        let pointer: fn(u64) -> u64 = first_of_all;
        let found = symbols(pointer as usize as u64);
        let outermost = found.last().expect("a test is not stripped");
        assert!(outermost.function.ends_with("::first_of_all"), "{found:?}");
        assert!(
            outermost.linkage_name.starts_with('_') && outermost.linkage_name.contains("first_of_all"),
            "{found:?}"
        );
    }

    #[test]
    fn threads_are_listed_by_name() {
        assert_eq!(thread("12 (a) b) S 1 2").map(|t| t.1).as_deref(), Some("12 a) b sleeping\n"));
        assert_eq!(thread("12 (a"), None);
        let text = ProcessProfiles.threads();
        assert!(text.starts_with("threads: ") && text.contains(&format!("{} ", std::process::id())), "{text}");
        assert!(comment(true).ends_with("repeat the request") && !comment(false).contains("repeat the request"));
    }
}
