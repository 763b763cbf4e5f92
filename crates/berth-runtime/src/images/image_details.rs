//! Details of an image for `berth images inspect`: record, layers on disk, original configuration.
//!
//! Implements spec 09b §7.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{commands::Image, error::ImageError, record::ImageRecord, store::ImageStore};

/// Details of one image as JSON.
///
/// # Errors
/// There is no such image, or the ID prefix is ambiguous.
pub async fn of(store: &ImageStore, name: &str) -> Result<Value, ImageError> {
    let missing = || ImageError::not_found(format!("image {name:?}: not found"));
    let record = store.status(name)?.ok_or_else(missing)?;
    let spec = store.spec(&record).await?;
    Ok(shown(&record, store, spec))
}

fn shown(record: &ImageRecord, store: &ImageStore, spec: Option<Value>) -> Value {
    let layers = record.layers.iter().map(|number| {
        let meta = store.layer(*number);
        json!({
            "number": number,
            "diffID": meta.as_ref().map(|meta| meta.diff_id),
            "chainID": meta.as_ref().map(|meta| meta.chain_id),
            "size": meta.as_ref().map(|meta| meta.size),
            "inodes": meta.as_ref().map(|meta| meta.inodes),
        })
    });
    let targets: BTreeMap<&str, _> = record.refs.iter().map(|known| (known.name.as_str(), known.target)).collect();
    let mut out = json!(Image::from(record));
    let more = json!({
        "target": record.target,
        "manifest": record.manifest,
        "targets": targets,
        "chainID": record.chain_id,
        "layers": layers.collect::<Vec<_>>(),
        "config": spec,
    });
    if let (Value::Object(all), Value::Object(more)) = (&mut out, more) {
        all.extend(more);
    }
    out
}
