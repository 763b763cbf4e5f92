//! Keeps which pressures the node reports, so that an agent that starts anew does not say that all is well.
//! Behaviour: spec 05 §3.10.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    engine::ports::{Clock, StateFile},
    eviction::{Picture, signals::Condition},
};

/// How long the file may take.
const FILE: Duration = Duration::from_secs(10);
/// How old what it says of a pressure that goes on may become.
const AGE: Duration = Duration::from_secs(10);

/// By type, until when each is reported.
type Written = BTreeMap<String, Timestamp>;

/// What an earlier agent reported, and for how long it still would have; nothing where that is not known.
pub(super) async fn restored(file: &dyn StateFile, now: Timestamp) -> Vec<(Condition, Duration)> {
    let content = match timeout(FILE, file.read()).await {
        Ok(Ok(content)) => content.unwrap_or_default(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    };
    left(&content, now)
}

fn left(content: &[u8], now: Timestamp) -> Vec<(Condition, Duration)> {
    let written: Written = serde_json::from_slice(content).unwrap_or_default();
    let left = |condition: Condition| {
        let until = written.get(condition.as_str())?;
        let left = Duration::try_from(until.duration_since(now)).ok()?;
        Some((condition, left)).filter(|(_, left)| !left.is_zero())
    };
    [Condition::Memory, Condition::Disk, Condition::Pid].into_iter().filter_map(left).collect()
}

/// Keeps it from now on, until stopped; `began` is when moments of pictures begin.
pub(super) async fn keep(
    file: Arc<dyn StateFile>,
    clock: Arc<dyn Clock>,
    began: Instant,
    mut pictures: watch::Receiver<Option<Arc<Picture>>>,
    stop: CancellationToken,
) {
    let (mut kept, mut at): (Option<Vec<Condition>>, _) = (None, Instant::now());
    loop {
        let moved = stop.run_until_cancelled(pictures.changed()).await;
        if !matches!(moved, Some(Ok(()))) {
            return;
        }
        let Some(picture) = pictures.borrow_and_update().clone() else { continue };
        let reported: Vec<Condition> = picture.pressures.iter().map(|(condition, _)| *condition).collect();
        let is_stale = !reported.is_empty() && at.elapsed() >= AGE;
        if kept.as_ref() == Some(&reported) && !is_stale {
            continue;
        }
        // A node without pressure that never had any needs no file.
        if kept.is_none() && reported.is_empty() && matches!(timeout(FILE, file.read()).await, Ok(Ok(None))) {
            kept = Some(reported);
            continue;
        }
        let (now, uptime) = (clock.now(), began.elapsed());
        let wall = |until: Duration| {
            let left = SignedDuration::try_from(until.saturating_sub(uptime)).unwrap_or(SignedDuration::MAX);
            now.saturating_add(left).unwrap_or(now)
        };
        let written: Written =
            picture.pressures.iter().map(|(condition, until)| (condition.as_str().to_owned(), wall(*until))).collect();
        let content = serde_json::to_vec(&written).unwrap_or_default(); // texts and times
        if !matches!(timeout(FILE, file.replace(content)).await, Ok(Ok(()))) {
            warn!(path = %file.path().display(), "Which pressures the node reports cannot be kept");
        }
        (kept, at) = (Some(reported), Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{agent::state_file::DiskStateFile, engine::ports::SystemClock};

    #[test]
    fn what_is_left_of_a_pressure() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().expect("a time");
        let content = br#"{"MemoryPressure":"2026-01-01T00:03:00Z","DiskPressure":"2026-01-01T00:00:59Z","X":"2027-01-01T00:00:00Z"}"#;
        assert_eq!(left(content, now), [(Condition::Memory, Duration::from_secs(120))]);
        for garbage in ["", "{", "[]", r#"{"MemoryPressure":"x"}"#, r#"{"MemoryPressure":7}"#, "\0"] {
            assert_eq!(left(garbage.as_bytes(), now), [], "{garbage}");
        }
    }

    #[tokio::test]
    async fn what_is_reported_is_kept_and_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = Arc::new(DiskStateFile::new(dir.path().join("eviction_state")));
        let (pictures, seen) = watch::channel(None);
        let stop = CancellationToken::new();
        let keeping = tokio::spawn(keep(file.clone(), Arc::new(SystemClock), Instant::now(), seen, stop.clone()));
        let show = |pressures| {
            pictures.send_replace(Some(Arc::new(Picture { pressures, ..Picture::default() })));
        };
        let until = async |expected: &[Condition]| {
            let found = async {
                loop {
                    let found = restored(&*file, Timestamp::now()).await;
                    if found.iter().map(|(condition, _)| *condition).eq(expected.iter().copied()) {
                        return found;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(Duration::from_secs(60), found).await.expect("kept")
        };
        show(vec![(Condition::Disk, Duration::from_secs(300))]);
        let found = until(&[Condition::Disk]).await;
        assert!(found.iter().all(|(_, left)| *left <= Duration::from_secs(300)), "{found:?}");
        show(Vec::new());
        until(&[]).await;
        stop.cancel();
        keeping.await.expect("ends");
    }
}
