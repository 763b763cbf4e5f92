//! Cache of credential provider responses with expiry (spec 03b §2.3). Pure.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{docker::DockerConfig, plugin_api::Scope};

const PURGE: Duration = Duration::from_secs(900);
const GLOBAL: &str = "<global>";

struct CredentialCacheEntry {
    until: Instant,
    logins: Arc<DockerConfig>,
}

/// Cached responses of one plugin.
#[derive(Default)]
pub struct Cache {
    entries: HashMap<String, CredentialCacheEntry>,
    purged: Option<Instant>,
}

fn registry(image: &str) -> &str {
    image.split('/').next().unwrap_or(image)
}

/// Cache key; neither images nor registries contain a space.
fn key(place: &str, whose: &str) -> String {
    if whose.is_empty() { place.to_owned() } else { format!("{place} {whose}") }
}

impl Cache {
    /// Unexpired logins for an image and caller key: cached for the image, its registry, or globally.
    pub fn get(&self, image: &str, whose: &str, now: Instant) -> Option<Arc<DockerConfig>> {
        let found = |place: &str| self.entries.get(&key(place, whose)).filter(|entry| now < entry.until);
        [image, registry(image), GLOBAL].into_iter().find_map(found).map(|entry| entry.logins.clone())
    }

    /// Caches a response, unless its duration is zero.
    pub fn put(
        &mut self,
        (scope, image, whose): (Scope, &str, &str),
        logins: Arc<DockerConfig>,
        keep: Duration,
        now: Instant,
    ) {
        if self.purged.is_none_or(|at| now.saturating_duration_since(at) >= PURGE) {
            self.entries.retain(|_, entry| now < entry.until);
            self.purged = Some(now);
        }
        let Some(until) = now.checked_add(keep).filter(|until| *until > now) else { return };
        let place = match scope {
            Scope::Image => image,
            Scope::Registry => registry(image),
            Scope::Global => GLOBAL,
        };
        self.entries.insert(key(place, whose), CredentialCacheEntry { until, logins });
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
            cache.put((scope, "r.io/a", "k"), Arc::default(), minute, now);
            assert_eq!(cache.get(image, "k", now).is_some(), found, "{scope:?} {image}");
            assert!(cache.get(image, "k", now + minute).is_none());
            assert!(cache.get(image, "", now).is_none() && cache.get(image, "l", now).is_none(), "it is another's");
        }
        let mut cache = Cache::default();
        cache.put((Scope::Global, "r.io/a", ""), Arc::default(), Duration::ZERO, now);
        assert!(cache.get("r.io/a", "", now).is_none(), "0 is not kept");
        cache.put((Scope::Image, "r.io/a", ""), Arc::default(), minute, now);
        cache.put((Scope::Image, "r.io/b", ""), Arc::default(), minute, now + PURGE);
        assert_eq!(cache.entries.len(), 1, "what has expired goes");
    }
}
