//! What differs between ConfigMaps and Secrets. Pure.

use super::held::Held;
use crate::{api::Resource, reflector::Kept};
use berth_types::api;

/// A kind of object that pods refer to by name.
pub trait ObjectKind: Kept + Into<Held<Self>> {
    /// Where it is served.
    const RESOURCE: Resource;
    /// What it is called in messages.
    const SINGULAR: &'static str;
}

impl ObjectKind for api::ConfigMap {
    const RESOURCE: Resource = Resource::CONFIG_MAPS;
    const SINGULAR: &'static str = "configmap";
}

impl ObjectKind for api::Secret {
    const RESOURCE: Resource = Resource::SECRETS;
    const SINGULAR: &'static str = "secret";
}
