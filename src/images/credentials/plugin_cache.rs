//! What a plugin said, for as long as it holds (spec 03b §2.3). Pure.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{docker::DockerConfig, plugin_answer::Scope};

const PURGE: Duration = Duration::from_secs(900);
const GLOBAL: &str = "<global>";

struct Entry {
    until: Instant,
    logins: Arc<DockerConfig>,
}

/// The answers of one plugin.
#[derive(Default)]
pub struct Cache {
    entries: HashMap<String, Entry>,
    purged: Option<Instant>,
}

fn registry(image: &str) -> &str {
    image.split('/').next().unwrap_or(image)
}

impl Cache {
    /// What holds for an image: said of it, of its registry, or of all.
    pub fn get(&self, image: &str, now: Instant) -> Option<Arc<DockerConfig>> {
        let found = |key: &str| self.entries.get(key).filter(|entry| now < entry.until);
        [image, registry(image), GLOBAL].into_iter().find_map(found).map(|entry| entry.logins.clone())
    }

    /// Keeps an answer; one that holds for no time is not kept.
    pub fn put(&mut self, scope: Scope, image: &str, logins: Arc<DockerConfig>, keep: Duration, now: Instant) {
        if self.purged.is_none_or(|at| now.saturating_duration_since(at) >= PURGE) {
            self.entries.retain(|_, entry| now < entry.until);
            self.purged = Some(now);
        }
        let Some(until) = now.checked_add(keep).filter(|until| *until > now) else { return };
        let key = match scope {
            Scope::Image => image,
            Scope::Registry => registry(image),
            Scope::Global => GLOBAL,
        };
        self.entries.insert(key.to_owned(), Entry { until, logins });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_hold_for_their_scope_and_time() {
        let now = Instant::now();
        let minute = Duration::from_secs(60);
        let rows = [
            (Scope::Image, "r.io/a", true),
            (Scope::Image, "r.io/b", false),
            (Scope::Registry, "r.io/b", true), // AC-03b-13
            (Scope::Registry, "q.io/b", false),
            (Scope::Global, "q.io/b", true),
        ];
        for (scope, image, found) in rows {
            let mut cache = Cache::default();
            cache.put(scope, "r.io/a", Arc::default(), minute, now);
            assert_eq!(cache.get(image, now).is_some(), found, "{scope:?} {image}");
            assert!(cache.get(image, now + minute).is_none());
        }
        let mut cache = Cache::default();
        cache.put(Scope::Global, "r.io/a", Arc::default(), Duration::ZERO, now);
        assert!(cache.get("r.io/a", now).is_none(), "0 is not kept");
        cache.put(Scope::Image, "r.io/a", Arc::default(), minute, now);
        cache.put(Scope::Image, "r.io/b", Arc::default(), minute, now + PURGE);
        assert_eq!(cache.entries.len(), 1, "what has expired goes");
    }
}
