//! Readiness of pod sources: pods missing from a source that has not answered must not be deleted.
//!
//! Pure. Implements spec 02a §2.5, with readiness per source (§14).

use std::collections::BTreeSet;

use berth_types::PodSource;

/// Registered sources that have not delivered an operation yet. A ready source stays ready.
#[derive(Clone, Debug)]
pub struct SourceReadiness {
    missing: BTreeSet<PodSource>,
}

impl SourceReadiness {
    /// Starts with every registered source not ready.
    pub fn new(registered: impl IntoIterator<Item = PodSource>) -> Self {
        Self { missing: registered.into_iter().collect() }
    }

    /// Marks the source as ready once one of its operations was processed. Returns true the first time.
    pub fn mark_ready(&mut self, source: PodSource) -> bool {
        self.missing.remove(&source)
    }

    /// Whether the source is ready, so that its removals are trusted.
    pub fn is_ready(&self, source: PodSource) -> bool {
        !self.missing.contains(&source)
    }

    /// Whether every registered source is ready.
    pub fn all(&self) -> bool {
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_is_per_source_and_stays() {
        let mut ready = SourceReadiness::new([PodSource::File, PodSource::Api]);
        assert!(!ready.all() && !ready.is_ready(PodSource::File) && ready.is_ready(PodSource::Http));
        assert!(ready.mark_ready(PodSource::File) && !ready.mark_ready(PodSource::File));
        assert!(ready.is_ready(PodSource::File) && !ready.all());
        assert!(ready.mark_ready(PodSource::Api) && ready.all());
        assert!(SourceReadiness::new([]).all());
    }
}
