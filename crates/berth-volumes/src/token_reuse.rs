//! Service account tokens in volumes of an earlier agent, for reuse by the token cache.
//!
//! Implements spec 10 §11, spec 10a §22.

use std::collections::BTreeMap;

use super::{
    api_objects, atomic_writer,
    layout::{PROJECTED, PodLayout},
};
use berth_ports::TokenRequest;
use berth_types::api;

/// Maximum size of a token in bytes.
const LONGEST: u64 = 64 * 1024;

/// File of a requested token in a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenFile {
    ask: TokenRequest,
    volume: String,
    path: String,
}

/// Returns the token files of the volumes.
pub fn files<'a>(volumes: impl IntoIterator<Item = &'a api::Volume>) -> Vec<TokenFile> {
    let mut found = Vec::new();
    for volume in volumes {
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        // In write order: a later source replaces an earlier one at the same path.
        let by_path: BTreeMap<&str, TokenRequest> = sources
            .filter_map(|source| source.service_account_token.as_ref())
            .map(|token| (token.path.as_str(), api_objects::token_of(token)))
            .collect();
        found.extend(by_path.into_iter().map(|(path, ask)| TokenFile {
            ask,
            volume: volume.name.clone(),
            path: path.to_owned(),
        }));
    }
    found
}

/// Reads the tokens from these files. Blocking.
pub fn read(layout: &PodLayout, files: Vec<TokenFile>) -> Vec<(TokenRequest, String)> {
    let of = |file: TokenFile| {
        let bytes = atomic_writer::read(&layout.volume(PROJECTED, &file.volume), &file.path, LONGEST)?;
        Some((file.ask, String::from_utf8(bytes).ok()?))
    };
    files.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_source_of_a_path_has_it() {
        let token = |path: &str, audience: &str| json!({"serviceAccountToken": {"path": path, "audience": audience}});
        let volume = json!({"name": "v", "projected": {"sources": [
            token("t", "a"), {"configMap": {"name": "c"}}, token("d/u", "b"), token("t", "c")]}});
        let volumes: Vec<api::Volume> = [volume, json!({"name": "w", "emptyDir": {}})]
            .into_iter()
            .map(|volume| serde_json::from_value(volume).expect("a volume"))
            .collect();
        let found: Vec<_> = files(&volumes).into_iter().map(|file| (file.path, file.ask.audience)).collect();
        assert_eq!(found, [("d/u".to_owned(), "b".to_owned()), ("t".to_owned(), "c".to_owned())]);
    }
}
