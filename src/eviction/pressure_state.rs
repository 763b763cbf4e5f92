//! Checkpoint of reported node pressures: they survive a restart of the agent.
//!
//! Implements spec 05 §3.10.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{NodeSnapshot, signals::PressureCondition};
use berth_ports::{Clock, OneWrite, StateFile};

/// Deadline for reading or writing the file.
const FILE: Duration = Duration::from_secs(10);
/// Maximum age of the file's content while a pressure lasts.
const AGE: Duration = Duration::from_secs(10);

/// Content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PressureCheckpoint {
    /// Boot ID of the machine at the time of the write.
    boot_id: String,
    /// By condition type, the time until which each is reported.
    until: BTreeMap<String, Timestamp>,
}

/// Pressures that an earlier agent reported, and for how long it would still report them; empty if the file cannot be
/// read.
pub async fn restored(file: &dyn StateFile, boot_id: &str, now: Timestamp) -> Vec<(PressureCondition, Duration)> {
    let content = match timeout(FILE, file.read()).await {
        Ok(Ok(content)) => content.unwrap_or_default(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    };
    left(&content, boot_id, now)
}

/// After a reboot only disk pressure is kept.
fn left(content: &[u8], boot_id: &str, now: Timestamp) -> Vec<(PressureCondition, Duration)> {
    let written: PressureCheckpoint = serde_json::from_slice(content).unwrap_or_default();
    let is_same_life = written.boot_id == boot_id && !boot_id.is_empty();
    let left = |condition: PressureCondition| {
        let until = written.until.get(condition.as_str())?;
        let left = Duration::try_from(until.duration_since(now)).ok()?;
        Some((condition, left)).filter(|(_, left)| !left.is_zero())
    };
    let may_last = |condition: &PressureCondition| is_same_life || *condition == PressureCondition::Disk;
    [PressureCondition::Memory, PressureCondition::Disk, PressureCondition::Pid]
        .into_iter()
        .filter(may_last)
        .filter_map(left)
        .collect()
}

/// Writes the checkpoint.
pub struct PressureStateFile {
    /// The checkpoint file.
    pub file: Arc<dyn StateFile>,
    /// Current boot ID of the machine.
    pub boot_id: String,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Instant from which moments of observations count.
    pub began: Instant,
}

impl PressureStateFile {
    /// Writes the checkpoint on each change, and periodically while a pressure lasts, until stopped.
    pub async fn run(self, mut pictures: watch::Receiver<Option<Arc<NodeSnapshot>>>, stop: CancellationToken) {
        let mut writes = OneWrite::new(self.file.clone(), FILE);
        let (mut kept, mut at): (Option<Vec<PressureCondition>>, _) = (None, Instant::now());
        let mut is_written = true;
        loop {
            let moved = stop.run_until_cancelled(pictures.changed()).await;
            if !matches!(moved, Some(Ok(()))) {
                return;
            }
            let Some(picture) = pictures.borrow_and_update().clone() else { continue };
            let reported: Vec<PressureCondition> = picture.pressures.iter().map(|(condition, _)| *condition).collect();
            let is_stale = (!reported.is_empty() || !is_written) && at.elapsed() >= AGE;
            if kept.as_ref() == Some(&reported) && !is_stale {
                continue;
            }
            // A node that never reported a pressure needs no file.
            if kept.is_none() && reported.is_empty() && matches!(timeout(FILE, self.file.read()).await, Ok(Ok(None))) {
                kept = Some(reported);
                continue;
            }
            let written = writes.replace(self.content(&picture)).await;
            if let Err(error) = &written {
                warn!(err = %error, path = %writes.file().path().display(), "Failed to store reported node pressure conditions");
            }
            (kept, at, is_written) = (Some(reported), Instant::now(), written.is_ok());
        }
    }

    fn content(&self, picture: &NodeSnapshot) -> Vec<u8> {
        let (now, uptime) = (self.clock.now(), self.began.elapsed());
        let wall = |until: Duration| {
            let left = SignedDuration::try_from(until.saturating_sub(uptime)).unwrap_or(SignedDuration::MAX);
            now.saturating_add(left).unwrap_or(now)
        };
        let until =
            picture.pressures.iter().map(|(condition, until)| (condition.as_str().to_owned(), wall(*until))).collect();
        let written = PressureCheckpoint { boot_id: self.boot_id.clone(), until };
        serde_json::to_vec(&written).unwrap_or_default() // only strings and timestamps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_ports::{DiskStateFile, SystemClock};

    #[test]
    fn what_is_left_of_a_pressure() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().expect("a time");
        let of = |until: &str| format!(r#"{{"bootId":"b","until":{until}}}"#);
        let content = of(
            r#"{"MemoryPressure":"2026-01-01T00:03:00Z","DiskPressure":"2026-01-01T00:00:59Z","X":"2027-01-01T00:00:00Z"}"#,
        );
        assert_eq!(left(content.as_bytes(), "b", now), [(PressureCondition::Memory, Duration::from_secs(120))]);
        for garbage in ["", "{", "[]", &of(r#"{"MemoryPressure":"x"}"#), &of(r#"{"MemoryPressure":7}"#), "\0"] {
            assert_eq!(left(garbage.as_bytes(), "b", now), [], "{garbage}");
        }
    }

    #[test]
    fn only_disks_outlast_the_life_of_a_machine() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().expect("a time");
        let at = "2026-01-01T00:01:01Z";
        let content = format!(
            r#"{{"bootId":"b","until":{{"MemoryPressure":"{at}","DiskPressure":"{at}","PIDPressure":"{at}"}}}}"#
        );
        let kinds = |boot_id| -> Vec<PressureCondition> {
            left(content.as_bytes(), boot_id, now).into_iter().map(|(condition, _)| condition).collect()
        };
        assert_eq!(kinds("b"), [PressureCondition::Memory, PressureCondition::Disk, PressureCondition::Pid]);
        assert_eq!(kinds("c"), [PressureCondition::Disk]);
        assert_eq!(kinds(""), [PressureCondition::Disk]);
    }

    #[tokio::test]
    async fn what_is_reported_is_kept_and_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = Arc::new(DiskStateFile::new(dir.path().join("eviction_state")));
        let (pictures, seen) = watch::channel(None);
        let stop = CancellationToken::new();
        let (clock, began) = (Arc::new(SystemClock), Instant::now());
        let state_file = PressureStateFile { file: file.clone(), boot_id: "b".to_owned(), clock, began };
        let keeping = tokio::spawn(state_file.run(seen, stop.clone()));
        let show = |pressures| {
            pictures.send_replace(Some(Arc::new(NodeSnapshot { pressures, ..NodeSnapshot::default() })));
        };
        let until = async |expected: &[PressureCondition]| {
            let found = async {
                loop {
                    let found = restored(&*file, "b", Timestamp::now()).await;
                    if found.iter().map(|(condition, _)| *condition).eq(expected.iter().copied()) {
                        return found;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(Duration::from_secs(60), found).await.expect("kept")
        };
        show(vec![(PressureCondition::Disk, Duration::from_secs(300))]);
        let found = until(&[PressureCondition::Disk]).await;
        assert!(found.iter().all(|(_, left)| *left <= Duration::from_secs(300)), "{found:?}");
        show(Vec::new());
        until(&[]).await;
        stop.cancel();
        keeping.await.expect("ends");
    }
}
