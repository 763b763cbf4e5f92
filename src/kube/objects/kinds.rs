//! What differs between ConfigMaps and Secrets. Pure.

use crate::{
    kube::{api::Resource, reflector::Kept},
    pod::api,
};

/// A kind of object that pods refer to by name.
pub trait ObjectKind: Kept {
    /// Where it is served.
    const RESOURCE: Resource;
    /// What it is called in messages.
    const SINGULAR: &'static str;

    /// It will never change.
    fn is_immutable(&self) -> bool;
}

impl ObjectKind for api::ConfigMap {
    const RESOURCE: Resource = Resource::CONFIG_MAPS;
    const SINGULAR: &'static str = "configmap";

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}

impl ObjectKind for api::Secret {
    const RESOURCE: Resource = Resource::SECRETS;
    const SINGULAR: &'static str = "secret";

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }
}
