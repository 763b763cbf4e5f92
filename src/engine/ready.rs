//! Which sources have answered: what is missing from a source that has not must not be deleted.
//! Pure. Behaviour: spec 02a §2.5, with readiness per source (§14).

use std::collections::BTreeSet;

use berth_types::PodSource;

/// Registered sources, and those of which an operation has been handled. Never goes back.
#[derive(Clone, Debug)]
pub struct SourcesReady {
    missing: BTreeSet<PodSource>,
}

impl SourcesReady {
    /// Nothing has been heard yet.
    pub fn new(registered: impl IntoIterator<Item = PodSource>) -> Self {
        Self { missing: registered.into_iter().collect() }
    }

    /// An operation of that source has been handled. True the first time.
    pub fn heard_from(&mut self, source: PodSource) -> bool {
        self.missing.remove(&source)
    }

    /// Whether that source's removals may be believed.
    pub fn is_ready(&self, source: PodSource) -> bool {
        !self.missing.contains(&source)
    }

    /// Whether every registered source has answered.
    pub fn all(&self) -> bool {
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_is_per_source_and_stays() {
        let mut ready = SourcesReady::new([PodSource::File, PodSource::Api]);
        assert!(!ready.all() && !ready.is_ready(PodSource::File) && ready.is_ready(PodSource::Http));
        assert!(ready.heard_from(PodSource::File) && !ready.heard_from(PodSource::File));
        assert!(ready.is_ready(PodSource::File) && !ready.all());
        assert!(ready.heard_from(PodSource::Api) && ready.all());
        assert!(SourcesReady::new([]).all());
    }
}
