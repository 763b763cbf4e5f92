//! OpenAPI v3 documents that kubectl reads before apply: patch paths, field validation. Pure.
//!
//! Implements spec 10a §3.

use serde_json::{Map, Value, json};

use super::resources::{KINDS, Kind};

/// OpenAPI document at or below `/openapi/v3`.
pub fn page(path: &str) -> Option<Value> {
    let place = path.strip_prefix("/openapi/v3")?.trim_matches('/');
    if place.is_empty() {
        let url = |place: String| json!({"serverRelativeURL": format!("/openapi/v3/{place}")});
        let paths: Map<String, Value> = KINDS.iter().map(|kind| (root(kind), url(root(kind)))).collect();
        return Some(json!({"paths": paths}));
    }
    let own = || KINDS.iter().filter(|kind| root(kind) == place);
    own().next()?;
    let paths: Map<String, Value> =
        own().map(|kind| (kind.path("{namespace}", "{name}", ""), json!({"patch": patch(kind)}))).collect();
    let info = json!({"title": "test API server", "version": "v1.36.2"});
    Some(json!({"openapi": "3.0.0", "info": info, "paths": paths}))
}

/// Group-version path: `api/v1`, `apis/coordination.k8s.io/v1`.
fn root(kind: &Kind) -> String {
    let group = kind.group();
    if group.is_empty() { format!("api/{}", kind.version) } else { format!("apis/{group}/{}", kind.version) }
}

fn patch(kind: &Kind) -> Value {
    let parameters: Vec<Value> = ["dryRun", "fieldManager", "fieldValidation", "force"]
        .iter()
        .map(|name| json!({"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": true}}))
        .collect();
    json!({
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": {"group": kind.group(), "version": kind.version, "kind": kind.kind},
        "parameters": parameters,
        // Without schemas, clients cannot compute strategic merge patches from this document; kubectl has built-in
        // types.
        "requestBody": {"content": {"application/merge-patch+json": {}}},
    })
}
