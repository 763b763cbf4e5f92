//! Profiles of this process: where its time goes, and who asked for its memory.

use std::{
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

use super::profiler::{self, Memory, Named, Shown, Taken, scaled};
use berth_proto::profile::Profile;
use berth_server::ports::{MemoryView, ProfileError, Profiles};
use berth_sys::{
    allocations::{self, INTERVAL, Noted, Record, Sum},
    sampler::{PER_SECOND, Refused, Sampling},
};

/// Profiles of this process.
pub struct ProcessProfiles;

#[async_trait]
impl Profiles for ProcessProfiles {
    async fn processor(&self, time: Duration) -> Result<Bytes, ProfileError> {
        let sampling = Sampling::start().map_err(|refused| match refused {
            Refused::Busy => ProfileError::Busy,
            Refused::Kernel => ProfileError::Failed("the kernel refuses a timer".to_owned()),
        })?;
        let at = now();
        tokio::time::sleep(time).await;
        let taken = Taken { at, duration: nanos(time), period: 1_000_000_000 / i64::from(PER_SECOND) };
        written(move || {
            let stacks = sampling.stacks();
            drop(sampling);
            info!(samples = stacks.len(), "Took a profile");
            zipped(&profiler::processor(&stacks, &mappings()?, taken, names))
        })
        .await
    }

    async fn memory(&self, view: MemoryView, time: Option<Duration>) -> Result<Bytes, ProfileError> {
        let at = now();
        let is_new = allocations::start().map_err(failed)?;
        let before = match time {
            None => Record::default(),
            Some(time) => {
                let before = allocations::record();
                tokio::time::sleep(time).await;
                before
            }
        };
        let duration = time.map_or(0, nanos);
        written(move || {
            let after = allocations::record();
            info!(stacks = after.stacks.len(), missed = after.missed, "Took a profile of memory");
            let taken = Taken { at, duration, period: i64::try_from(INTERVAL).unwrap_or(i64::MAX) };
            let shown = if view == MemoryView::Held { Shown::Held } else { Shown::Asked };
            let comment = comment(is_new && time.is_none(), after.missed);
            zipped(&profiler::memory(&since(&before, &after), (&mappings()?, taken), (shown, &comment), names))
        })
        .await
    }

    fn threads(&self) -> String {
        let mut threads: Vec<(u32, String)> = Vec::new();
        for entry in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            // A thread may be gone by now.
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

/// A line for people: id, name, state.
fn thread(stat: &str) -> Option<(u32, String)> {
    let (id, rest) = stat.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let state = match rest.chars().next()? {
        'R' => "running",
        'S' => "sleeping",
        'D' => "waiting for a device",
        'T' | 't' => "stopped",
        _ => "other",
    };
    let id = id.parse().ok()?;
    let mut line = String::new();
    writeln!(line, "{id} {name} {state}").ok()?;
    Some((id, line))
}

fn comment(is_new: bool, missed: u64) -> String {
    let mut text = format!("one sample per {INTERVAL} bytes asked for since sampling began");
    if is_new {
        text.push_str(", which was with this request: ask again");
    }
    if missed > 0 {
        let _ = write!(text, "; {missed} samples were missed for want of room"); // a String takes all
    }
    text
}

/// What came between two records: the later one begins with the stacks of the earlier one.
fn since(before: &Record, after: &Record) -> Vec<Memory> {
    let none = Noted { frames: Vec::new(), asked: Sum::default(), freed: Sum::default() };
    let earlier = before.stacks.iter().chain(std::iter::repeat(&none));
    let pairs = after.stacks.iter().zip(earlier);
    let grown =
        |after: (i64, i64), before: (i64, i64)| (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
    let memory = pairs.map(|(now, then)| Memory {
        stack: now.frames.clone(),
        asked: grown(whole(now.asked), whole(then.asked)),
        held: grown(whole(held(now)), whole(held(then))),
    });
    memory.filter(|memory| memory.asked != (0, 0) || memory.held != (0, 0)).collect()
}

fn held(noted: &Noted) -> Sum {
    Sum {
        blocks: noted.asked.blocks.saturating_sub(noted.freed.blocks),
        bytes: noted.asked.bytes.saturating_sub(noted.freed.bytes),
    }
}

fn whole(sum: Sum) -> (i64, i64) {
    scaled(sum.blocks, sum.bytes, INTERVAL)
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

/// Naming places takes a while: on a thread that may.
async fn written(write: impl FnOnce() -> io::Result<Bytes> + Send + 'static) -> Result<Bytes, ProfileError> {
    tokio::task::spawn_blocking(write).await.map_err(failed)?.map_err(failed)
}

fn mappings() -> io::Result<Vec<profiler::Mapped>> {
    Ok(profiler::mappings(&std::fs::read_to_string("/proc/self/maps")?))
}

fn zipped(profile: &Profile) -> io::Result<Bytes> {
    let mut zip = GzEncoder::new(Vec::new(), Compression::fast());
    zip.write_all(&profile.encode_to_vec())?;
    Ok(zip.finish()?.into())
}

/// What an address is called, as far as the program was not stripped.
fn names(address: u64) -> Vec<Named> {
    let mut found = Vec::new();
    // The crate takes every address for one that is returned to, and looks before it: at the function
    // before, where a sample was taken on the first instruction of one.
    let Ok(address) = usize::try_from(address.saturating_add(1)) else { return found };
    backtrace::resolve(std::ptr::without_provenance_mut(address), |symbol| {
        if let Some(name) = symbol.name() {
            found.push(Named {
                // Without the hash that tells builds apart.
                function: format!("{name:#}"),
                symbol: String::from_utf8_lossy(name.as_bytes()).into_owned(),
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
    fn only_what_came_between_is_told() {
        let noted = |asked: u64, freed: u64| Noted {
            frames: vec![asked],
            asked: Sum { blocks: asked, bytes: asked << 30 },
            freed: Sum { blocks: freed, bytes: freed << 30 },
        };
        let record =
            |stacks: &[(u64, u64)]| Record { stacks: stacks.iter().map(|s| noted(s.0, s.1)).collect(), missed: 0 };
        let told = since(&record(&[(3, 1), (2, 0)]), &record(&[(5, 4), (2, 0), (1, 0)]));
        let blocks: Vec<(i64, i64)> = told.iter().map(|memory| (memory.asked.0, memory.held.0)).collect();
        assert_eq!(blocks, [(2, -1), (1, 1)]);
    }

    #[test]
    fn the_first_instruction_belongs_to_its_function() {
        #[inline(never)]
        fn first_of_all(of: u64) -> u64 {
            std::hint::black_box(of) + 1
        }
        assert_eq!(first_of_all(1), 2);
        let pointer: fn(u64) -> u64 = first_of_all;
        let named = names(pointer as usize as u64);
        let outermost = named.last().expect("a test is not stripped");
        assert!(outermost.function.ends_with("::first_of_all"), "{named:?}");
        assert!(outermost.symbol.starts_with('_') && outermost.symbol.contains("first_of_all"), "{named:?}");
    }

    #[test]
    fn threads_are_told_by_name() {
        assert_eq!(thread("12 (a) b) S 1 2").map(|t| t.1).as_deref(), Some("12 a) b sleeping\n"));
        assert_eq!(thread("12 (a"), None);
        let text = ProcessProfiles.threads();
        assert!(text.starts_with("threads: ") && text.contains(&format!("{} ", std::process::id())), "{text}");
        assert!(comment(true, 3).ends_with("ask again; 3 samples were missed for want of room"));
    }
}
