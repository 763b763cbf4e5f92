//! In-memory index of all images by ID and by name. Pure.
//!
//! Names are rebuilt from the records: of two images with the same name the later reference wins.
//! Implements spec 09b §1-§3, 09 §7.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    digest::Digest,
    error::ImageError,
    names::{Name, id_prefix},
    record::{ImageRecord, ImageReference},
};

/// Index of images by ID and by name.
#[derive(Clone, Debug, Default)]
pub struct Catalogue {
    images: BTreeMap<Digest, Arc<ImageRecord>>,
    names: BTreeMap<String, Digest>,
}

impl Catalogue {
    /// Builds the index from the records on disk. A record that loses a name changes in memory only.
    pub fn new(records: impl IntoIterator<Item = ImageRecord>) -> Self {
        let mut all: Vec<ImageRecord> = records.into_iter().collect();
        let mut latest: BTreeMap<String, (i64, Digest)> = BTreeMap::new();
        for record in &all {
            for reference in record.refs.iter().filter(|reference| !reference.name.contains('@')) {
                let claim = (reference.ref_time, record.id);
                let newest = latest.entry(reference.name.clone()).or_insert(claim);
                *newest = claim.max(*newest);
            }
        }
        for record in &mut all {
            let id = record.id;
            record.refs.retain(|reference| latest.get(&reference.name).is_none_or(|(_, holder)| *holder == id));
        }
        let mut out = Self::default();
        all.into_iter().for_each(|record| out.put(record));
        out
    }

    /// Adds or replaces an image.
    fn put(&mut self, record: ImageRecord) {
        for reference in &record.refs {
            self.names.insert(reference.name.clone(), record.id);
        }
        self.images.insert(record.id, Arc::new(record));
    }

    /// All images, newest first.
    pub fn list(&self) -> Vec<Arc<ImageRecord>> {
        let mut out: Vec<_> = self.images.values().cloned().collect();
        out.sort_by_key(|record| std::cmp::Reverse((record.created, record.id)));
        out
    }

    /// Images of a repository given without tag or digest, newest first; empty for any other text.
    pub fn of_repository(&self, text: &str) -> Vec<Arc<ImageRecord>> {
        let Some(wanted) = Name::repository_in(text) else { return Vec::new() };
        let is_of = |name: &str| Name::parse(name).is_ok_and(|name| name.repository() == wanted);
        self.list().into_iter().filter(|image| image.refs.iter().any(|reference| is_of(&reference.name))).collect()
    }

    /// The image with this ID.
    pub fn get(&self, id: &Digest) -> Option<Arc<ImageRecord>> {
        self.images.get(id).cloned()
    }

    /// The image that the text refers to: an ID, a prefix of one, or a name.
    ///
    /// # Errors
    /// The ID prefix is ambiguous.
    pub fn find(&self, text: &str) -> Result<Option<Arc<ImageRecord>>, ImageError> {
        if let Some(prefix) = id_prefix(text) {
            let mut found = self.images.values().filter(|record| record.id.hex().starts_with(prefix));
            match (found.next(), found.next()) {
                (Some(record), None) => return Ok(Some(Arc::clone(record))),
                (Some(_), Some(_)) => return Err(ImageError::invalid(format!("image id {text:?} is ambiguous"))),
                (None, _) => {}
            }
        }
        let Ok(name) = Name::parse(text) else { return Ok(None) };
        Ok(self.named(&name.to_string()))
    }

    /// The image with this normalized name.
    pub fn named(&self, name: &str) -> Option<Arc<ImageRecord>> {
        self.names.get(name).and_then(|id| self.get(id))
    }

    /// The image pulled from this manifest or index; for an index the image must have the given manifest.
    pub fn targeting(&self, target: &Digest, manifest: &Digest) -> Option<Arc<ImageRecord>> {
        let leads = |record: &&Arc<ImageRecord>| {
            let names_it =
                record.target.digest == *target || record.refs.iter().any(|reference| reference.target == *target);
            names_it && (target == manifest || record.manifest.digest == *manifest)
        };
        self.images.values().find(leads).cloned()
    }

    /// Adds an image, or names to an existing one. Returns the records to write in this order: the image that gains a
    /// name comes before the one that loses it.
    pub fn add(&mut self, mut record: ImageRecord) -> Vec<Arc<ImageRecord>> {
        if let Some(old) = self.images.get(&record.id) {
            let mut refs = old.refs.clone();
            refs.retain(|reference| record.refs.iter().all(|new| new.name != reference.name));
            refs.append(&mut record.refs);
            record.refs = refs;
            record.pinned |= old.pinned;
            record.created = old.created;
        }
        let mut written = vec![record.id];
        for reference in &record.refs {
            let Some(holder) = self.names.get(&reference.name).filter(|holder| **holder != record.id) else { continue };
            if let Some(other) = self.images.get_mut(holder) {
                let mut without = ImageRecord::clone(other);
                without.refs.retain(|known| known.name != reference.name);
                written.push(without.id);
                *other = Arc::new(without);
            }
        }
        self.put(record);
        written.dedup();
        written.iter().filter_map(|id| self.get(id)).collect()
    }

    /// Removes an image with all its names.
    pub fn remove(&mut self, id: &Digest) -> Option<Arc<ImageRecord>> {
        let record = self.images.remove(id)?;
        self.names.retain(|_, holder| holder != id);
        Some(record)
    }

    /// Modifies one image.
    pub fn update(&mut self, id: &Digest, change: impl FnOnce(&mut ImageRecord)) -> Option<Arc<ImageRecord>> {
        let record = self.images.get_mut(id)?;
        change(Arc::make_mut(record));
        Some(Arc::clone(record))
    }
}

/// References for an image requested by `name`: the tag, if any, and one digest (spec 09b §2).
pub fn references(name: &Name, target: Digest, now: i64) -> Vec<ImageReference> {
    let reference = |name: &Name| ImageReference { name: name.to_string(), target, ref_time: now };
    match name.tag() {
        Some(_) => vec![reference(name), reference(&name.at(target))],
        None => vec![reference(name)],
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::images::{
        model::Descriptor,
        record::{ImageOrigin, Platform, StoredFile},
    };
    use crate::launch::image::ImageConfig;

    pub(crate) fn record(id: &str, names: &[&str], ref_time: i64) -> ImageRecord {
        let target = Descriptor::of("m", id.as_bytes());
        let refs =
            names.iter().flat_map(|name| references(&Name::parse(name).expect("a name"), target.digest, ref_time));
        ImageRecord {
            v: 1,
            id: Digest::of(id.as_bytes()),
            refs: refs.collect(),
            manifest: target.clone(),
            target,
            platform: Platform::default(),
            layers: vec![],
            chain_id: None,
            size: 1,
            config: ImageConfig::default(),
            passwd: StoredFile::Missing,
            group: StoredFile::Missing,
            pinned: false,
            source: ImageOrigin::Pull,
            created: ref_time,
            last_used: 0,
        }
    }

    fn tags(catalogue: &Catalogue, id: &str) -> Option<Vec<String>> {
        catalogue.get(&Digest::of(id.as_bytes())).map(|record| record.repo_tags())
    }

    #[test]
    fn a_tag_that_moves_leaves_the_digest_behind() {
        let mut catalogue = Catalogue::default();
        catalogue.add(record("old", &["a:1"], 1));
        let written = catalogue.add(record("new", &["a:1"], 2));
        assert_eq!(
            written.iter().map(|record| record.id).collect::<Vec<_>>(),
            [Digest::of(b"new"), Digest::of(b"old")]
        );
        assert_eq!(tags(&catalogue, "old"), Some(vec![]));
        assert_eq!(catalogue.get(&Digest::of(b"old")).expect("still there").repo_digests().len(), 1);
        assert_eq!(tags(&catalogue, "new"), Some(vec!["docker.io/library/a:1".into()]));
    }

    #[test]
    fn of_two_claims_the_later_holds() {
        let catalogue = Catalogue::new([record("a", &["x"], 5), record("b", &["x"], 7), record("c", &["x"], 6)]);
        assert_eq!(catalogue.find("x").expect("no prefix").expect("found").id, Digest::of(b"b"));
        assert_eq!((tags(&catalogue, "a"), tags(&catalogue, "c")), (Some(vec![]), Some(vec![])));
    }

    #[test]
    fn images_are_found_by_any_form() {
        let mut catalogue = Catalogue::default();
        catalogue.add(record("one", &["busybox:1", "other.tld/b:2"], 1));
        (0..40).for_each(|i| drop(catalogue.add(record(&i.to_string(), &[], 2))));
        let id = Digest::of(b"one");
        let digest_name = format!("docker.io/library/busybox@{id}");
        // The target digest of a test record equals its ID.
        for text in [
            &id.to_string(),
            &id.hex(),
            &id.hex()[..20],
            "busybox:1",
            "docker.io/busybox:1",
            "other.tld/b:2",
            &digest_name,
        ] {
            assert_eq!(catalogue.find(text).expect("one").map(|record| record.id), Some(id), "{text}");
        }
        // AC-09b-I12
        for text in ["Not A Ref!!", "busybox:2", "busybox", "", &"0".repeat(64)] {
            assert!(catalogue.find(text).expect("no error").is_none(), "{text}");
        }
        let ambiguous = (0..16).map(|digit| format!("{digit:x}")).find_map(|prefix| catalogue.find(&prefix).err());
        assert_eq!(ambiguous.map(|error| error.kind), Some(super::super::error::ImageErrorKind::InvalidArgument));
    }

    #[test]
    fn removal_takes_all_names() {
        // AC-09b-I1
        let mut catalogue = Catalogue::default();
        catalogue.add(record("one", &["a:1"], 1));
        catalogue.add(record("one", &["b:1"], 2));
        assert_eq!(tags(&catalogue, "one").map(|tags| tags.len()), Some(2));
        let id = catalogue.find("a:1").expect("a name").expect("found").id;
        catalogue.remove(&id);
        assert!(catalogue.find("b:1").expect("a name").is_none());
        assert!(catalogue.list().is_empty());
    }
}
