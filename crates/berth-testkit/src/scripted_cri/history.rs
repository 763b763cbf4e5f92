//! Chronological history of sandboxes and containers in the scripted CRI, with invariant checks.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

/// Lifecycle event of a sandbox or container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifecycleEvent {
    /// Sandbox became ready.
    SandboxReady {
        /// Sandbox ID.
        sandbox: String,
        /// UID of its pod.
        uid: String,
        /// Name of its pod.
        pod: String,
        /// Attempt in its metadata.
        attempt: u32,
        /// Whether the pod comes from a file or URL.
        is_static: bool,
    },
    /// Sandbox is no longer ready.
    SandboxStopped(String),
    /// Sandbox was removed.
    SandboxRemoved(String),
    /// Container was created.
    Created {
        /// Container ID.
        container: String,
        /// ID of its sandbox.
        sandbox: String,
        /// Container name.
        name: String,
    },
    /// Container started.
    Started(String),
    /// Container exited with that exit code.
    Exited(String, i32),
    /// Container was removed.
    Removed(String),
}

/// Lifecycle event and its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimedEvent {
    /// Time on tokio's monotonic clock.
    pub at: Instant,
    /// The event.
    pub fact: LifecycleEvent,
}

/// Period during which a condition was true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// UID of the pod.
    pub whose: String,
    /// Start of the period.
    pub from: Instant,
    /// End of the period; `None` if it is still open.
    pub until: Option<Instant>,
}

/// All lifecycle events, in order.
#[derive(Debug, Clone, Default)]
pub struct History(pub Vec<TimedEvent>);

struct SandboxPod<'a> {
    uid: &'a str,
    pod: &'a str,
    is_static: bool,
}

impl History {
    pub(super) fn note(&mut self, fact: LifecycleEvent) {
        self.0.push(TimedEvent { at: Instant::now(), fact });
    }

    fn homes(&self) -> BTreeMap<&str, SandboxPod<'_>> {
        let mut homes = BTreeMap::new();
        for moment in &self.0 {
            if let LifecycleEvent::SandboxReady { sandbox, uid, pod, is_static, .. } = &moment.fact {
                homes.insert(sandbox.as_str(), SandboxPod { uid, pod, is_static: *is_static });
            }
        }
        homes
    }

    /// Starts of containers while another static pod of the same name runs containers, as text.
    pub fn overlaps(&self) -> Vec<String> {
        let homes = self.homes();
        let mut of: BTreeMap<&str, &SandboxPod<'_>> = BTreeMap::new();
        let mut running: BTreeMap<&str, BTreeMap<&str, BTreeSet<&str>>> = BTreeMap::new();
        let mut found = Vec::new();
        for moment in &self.0 {
            match &moment.fact {
                LifecycleEvent::Created { container, sandbox, .. } => {
                    if let Some(home) = homes.get(sandbox.as_str()).filter(|home| home.is_static) {
                        of.insert(container, home);
                    }
                }
                LifecycleEvent::Started(container) => {
                    let Some(home) = of.get(container.as_str()) else { continue };
                    let pods = running.entry(home.pod).or_default();
                    pods.entry(home.uid).or_default().insert(container);
                    if pods.len() > 1 {
                        found.push(format!("static pods {:?} named {} overlap", pods.keys(), home.pod));
                    }
                }
                LifecycleEvent::Exited(container, _) | LifecycleEvent::Removed(container) => {
                    let Some(home) = of.get(container.as_str()) else { continue };
                    let pods = running.entry(home.pod).or_default();
                    if let Some(containers) = pods.get_mut(home.uid) {
                        containers.remove(container.as_str());
                        if containers.is_empty() {
                            pods.remove(home.uid);
                        }
                    }
                }
                _ => {}
            }
        }
        found
    }

    /// Periods during which one pod had two or more ready sandboxes.
    pub fn doubled_sandboxes(&self) -> Vec<Span> {
        let homes = self.homes();
        let mut ready: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut open: BTreeMap<&str, Instant> = BTreeMap::new();
        let mut spans = Vec::new();
        for TimedEvent { at, fact } in &self.0 {
            let (sandbox, is_ready) = match fact {
                LifecycleEvent::SandboxReady { sandbox, .. } => (sandbox.as_str(), true),
                LifecycleEvent::SandboxStopped(sandbox) | LifecycleEvent::SandboxRemoved(sandbox) => {
                    (sandbox.as_str(), false)
                }
                _ => continue,
            };
            let Some(home) = homes.get(sandbox) else { continue };
            let of_pod = ready.entry(home.uid).or_default();
            if is_ready {
                of_pod.insert(sandbox);
            } else {
                of_pod.remove(sandbox);
            }
            if of_pod.len() > 1 {
                open.entry(home.uid).or_insert(*at);
            } else if let Some(from) = open.remove(home.uid) {
                spans.push(Span { whose: home.uid.to_owned(), from, until: Some(*at) });
            }
        }
        spans.extend(open.into_iter().map(|(uid, from)| Span { whose: uid.to_owned(), from, until: None }));
        spans
    }

    /// Number of starts of containers with that name in a pod.
    pub fn starts(&self, uid: &str, name: &str) -> usize {
        let homes = self.homes();
        let made: BTreeSet<&str> = self
            .0
            .iter()
            .filter_map(|m| match &m.fact {
                LifecycleEvent::Created { container, sandbox, name: n } if n == name => {
                    homes.get(sandbox.as_str()).is_some_and(|h| h.uid == uid).then_some(container.as_str())
                }
                _ => None,
            })
            .collect();
        self.0.iter().filter(|m| matches!(&m.fact, LifecycleEvent::Started(c) if made.contains(c.as_str()))).count()
    }
}
