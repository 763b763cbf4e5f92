//! Players for roles that have nothing to play without an API server.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use async_trait::async_trait;

use crate::{
    engine::ports::{MirrorFate, MirrorPods, ObjectError, ObjectSource, PullSecret},
    pod::{Pod, PodFullName, api},
};

/// There is no API server: references fail with the reference's words, no service exists.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObjects;

#[async_trait]
impl ObjectSource for NoObjects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: "configMap", namespace, name })
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: "secret", namespace, name })
    }

    fn services(&self, _namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        Some(Vec::new())
    }

    async fn runtime_handler(&self, _class: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }

    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        let named = pod.spec().image_pull_secrets.iter().flatten().map(|s| s.name.clone());
        (Vec::new(), named.filter(|name| !name.is_empty()).collect())
    }
}

/// There is no API server: static pods have no mirrors.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMirrors;

impl MirrorPods for NoMirrors {
    fn want(&self, _pod: &Arc<Pod>) {}

    fn keep(&self, _names: HashMap<PodFullName, MirrorFate>) {}
}
