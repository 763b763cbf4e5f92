//! Trait that abstracts over ConfigMaps and Secrets. Pure.

use super::cached_object::CachedObject;
use crate::{api::Resource, reflector::ReflectedObject};
use berth_types::api;

/// Object type that pods refer to by name.
pub trait ObjectKind: ReflectedObject + Into<CachedObject<Self>> {
    /// API resource.
    const RESOURCE: Resource;
    /// Singular name in messages.
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
