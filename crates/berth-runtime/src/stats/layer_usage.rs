//! Usage of writable layers: cached, and recounted one by one in the background on request.
//!
//! A request returns the cached values. It waits only for layers that were never counted, and only briefly.
//! Implements spec 09a §5.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::watch, task::spawn_blocking, time::timeout};
use tracing::warn;

use crate::{
    errors::{RuntimeError, RuntimeResult},
    images::usage,
    ports::Images,
    runtime::now_ns,
    runtime_context::RuntimeContext,
    store::Layout,
};

/// Minimum validity of a count, nanoseconds.
const FRESH_NS: i64 = 10_000_000_000;
/// A count is also valid for this multiple of its duration, so that a large layer is not counted continuously.
const TIMES: i64 = 100;
/// Maximum wait for layers that were never counted.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// Usage of a writable layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerUsage {
    /// Time of the count, nanoseconds since the epoch.
    pub at_ns: i64,
    /// Used bytes.
    pub bytes: u64,
    /// Used inodes.
    pub inodes: u64,
    /// Duration of the count, nanoseconds.
    took_ns: i64,
}

impl LayerUsage {
    fn is_fresh(&self, now_ns: i64) -> bool {
        (0..FRESH_NS.max(self.took_ns.saturating_mul(TIMES))).contains(&now_ns.saturating_sub(self.at_ns))
    }
}

/// Cache of the usage of all layers.
#[derive(Debug, Default)]
pub struct LayerUsageCache {
    state: Mutex<CountState>,
    /// Number of completed counts.
    counted: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct CountState {
    known: BTreeMap<String, LayerUsage>,
    wanted: BTreeSet<String>,
    /// The layer that is being counted; `None` while idle, or after its container was removed.
    current: Option<String>,
    /// Containers whose last count failed, to log only the first failure.
    failed: BTreeSet<String>,
    is_counting: bool,
}

impl LayerUsageCache {
    /// The known usage of these containers' layers; starts a count of stale ones.
    pub async fn used(
        self: &Arc<Self>,
        shell: &Arc<RuntimeContext>,
        images: &Arc<dyn Images>,
        containers: &[String],
    ) -> BTreeMap<String, LayerUsage> {
        let mut counted = self.counted.subscribe();
        if self.want(containers) {
            let (layers, images, stop) = (self.clone(), images.clone(), shell.stop.clone());
            let layout = shell.layout.clone();
            shell.spawn(async move {
                tokio::select! {
                    () = layers.count(&*images, &layout) => {}
                    () = stop.cancelled() => {}
                }
            });
        }
        let is_known = |_: &u64| {
            let state = self.state();
            containers.iter().all(|id| state.known.contains_key(id) || !state.is_counting)
        };
        // A layer that is not counted in time is missing from this result.
        let _ = timeout(FIRST_WAIT, counted.wait_for(is_known)).await;
        let state = self.state();
        containers.iter().filter_map(|id| Some((id.clone(), *state.known.get(id)?))).collect()
    }

    /// Drops the usage of a removed container.
    pub fn forget(&self, container: &str) {
        let mut state = self.state();
        state.known.remove(container);
        state.wanted.remove(container);
        state.failed.remove(container);
        if state.current.as_deref() == Some(container) {
            state.current = None;
        }
    }

    fn state(&self) -> MutexGuard<'_, CountState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues stale layers. Returns whether the caller must start the counting task.
    fn want(&self, containers: &[String]) -> bool {
        let (mut state, now) = (self.state(), now_ns());
        for id in containers {
            if !state.known.get(id).is_some_and(|used| used.is_fresh(now)) && state.current.as_ref() != Some(id) {
                state.wanted.insert(id.clone());
            }
        }
        let begins = !state.is_counting && !state.wanted.is_empty();
        state.is_counting |= begins;
        begins
    }

    async fn count(&self, images: &dyn Images, layout: &Layout) {
        while let Some(id) = self.next() {
            let begun = now_ns();
            let counted = written(images, layout, &id).await;
            let at_ns = now_ns();
            let mut state = self.state();
            let is_there = state.current.take().is_some();
            match counted {
                Ok((bytes, inodes)) if is_there => {
                    state.failed.remove(&id);
                    state.known.insert(id, LayerUsage { at_ns, bytes, inodes, took_ns: at_ns.saturating_sub(begun) });
                }
                Ok(_) => {}
                // The previous value remains.
                Err(cause) if is_there && state.failed.insert(id.clone()) => {
                    warn!(containerID = id, err = %cause, "Failed to measure writable layer of the container");
                }
                Err(_) => {}
            }
            drop(state);
            self.counted.send_modify(|count| *count = count.wrapping_add(1));
        }
        self.counted.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// The next layer to count; `None` ends the counting.
    fn next(&self) -> Option<String> {
        let mut state = self.state();
        let next = state.wanted.pop_first();
        state.current.clone_from(&next);
        state.is_counting = next.is_some();
        next
    }
}

/// Bytes and inodes of a container's writable layer and of its image's volumes: the container writes to both.
async fn written(images: &dyn Images, layout: &Layout, id: &str) -> RuntimeResult<(u64, u64)> {
    let (bytes, inodes) = images.written(id).await?;
    let volumes = layout.volumes(id);
    let counted = spawn_blocking(move || in_volumes(&volumes)).await.map_err(io::Error::from).flatten();
    let counted = counted.map_err(|error| RuntimeError::other(format!("measure image volumes: {error}")))?;
    Ok((bytes.saturating_add(counted.0), inodes.saturating_add(counted.1)))
}

/// Bytes and inodes of image volumes; zero where the directory does not exist.
fn in_volumes(directory: &Path) -> io::Result<(u64, u64)> {
    match usage::count(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((0, 0)),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C11 (c)
    #[test]
    fn volumes_of_images_count_as_what_a_container_wrote() {
        let root = tempfile::tempdir().expect("a directory");
        let volumes = root.path().join("volumes");
        assert_eq!(in_volumes(&volumes).expect("none"), (0, 0));
        std::fs::create_dir_all(volumes.join("one/below")).expect("makeable");
        std::fs::write(volumes.join("one/below/file"), vec![1; 200 << 10]).expect("writable");
        let (bytes, inodes) = in_volumes(&volumes).expect("countable");
        assert!((200 << 10..300 << 10).contains(&bytes) && (3..=4).contains(&inodes), "{bytes} {inodes}");
    }

    #[test]
    fn a_count_is_good_for_a_while() {
        let used = |took_ns| LayerUsage { at_ns: 100, bytes: 1, inodes: 1, took_ns };
        assert!(used(0).is_fresh(100 + FRESH_NS - 1) && !used(0).is_fresh(100 + FRESH_NS));
        assert!(used(FRESH_NS).is_fresh(100 + FRESH_NS * 99) && !used(FRESH_NS).is_fresh(100 + FRESH_NS * 100));
        assert!(!used(0).is_fresh(99), "time went back");
    }

    #[test]
    fn what_is_gone_is_not_counted_any_more() {
        let layers = LayerUsageCache::default();
        assert!(layers.want(&["a".to_owned(), "b".to_owned()]) && !layers.want(&["c".to_owned()]), "one counts");
        assert_eq!(layers.next().as_deref(), Some("a"));
        layers.forget("a");
        layers.forget("b");
        assert_eq!(layers.state().current, None);
        assert_eq!((layers.next().as_deref(), layers.next()), (Some("c"), None));
        assert!(layers.want(&["a".to_owned()]), "a new measurement has to start");
    }
}
