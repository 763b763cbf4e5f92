//! Container environment: reads referenced objects and env files, and builds it (`pod::env`).

use std::{
    collections::{BTreeMap, HashMap},
    io::Read as _,
    path::PathBuf,
    sync::Arc,
};

use rustix::fs::OFlags;

use super::{ContainerRequest, PrepareError, Preparer, blocking, text_of, within};
use berth_ports::{ObjectError, ObjectSource};
use berth_sys::sub_path;
use berth_types::{
    env::{self, EnvInputs, ObjectRead, ReadFile},
    fieldpath::{self, NodeAddresses},
};

/// Maximum bytes read of an env file.
const ENV_FILE_MAX: u64 = 1 << 20;

impl Preparer {
    /// Builds the environment of a container: names unique, in declared order.
    pub(super) async fn environment(
        &self,
        request: &ContainerRequest<'_>,
        devices: &[(String, String)],
        at: NodeAddresses<'_>,
        allocatable: &BTreeMap<String, String>,
    ) -> Result<Vec<(String, String)>, PrepareError> {
        let (pod, container) = (request.pod, request.container);
        let wanted = env::references(container);
        let objects = &*self.deps.objects;
        let (config_maps, secrets) = within("ConfigMaps and Secrets of the environment", async {
            let mut config_maps = HashMap::new();
            for name in wanted.config_maps {
                let read = read_of(objects.config_map(pod.namespace(), &name).await);
                config_maps.insert(name, read);
            }
            let mut secrets = HashMap::new();
            for name in wanted.secrets {
                let read = read_of(objects.secret(pod.namespace(), &name).await);
                secrets.insert(name, read);
            }
            (config_maps, secrets)
        })
        .await?;
        let mut files = HashMap::new();
        for (volume, path) in wanted.files {
            let read = env_file(request, &volume, &path).await;
            files.insert((volume, path), read);
        }
        let services = services(objects, request);
        let inputs = EnvInputs {
            namespace: pod.namespace(),
            devices,
            service_links: pod.spec().enable_service_links,
            services: services.as_deref(),
            config_maps: &config_maps,
            secrets: &secrets,
            files: &files,
            field: &|selector| fieldpath::env_field(pod, selector, at).map_err(|e| e.to_string()),
            resource: &|selector| {
                fieldpath::resource_value(pod, selector, Some(container), allocatable).map_err(|e| e.to_string())
            },
        };
        env::build(container, &inputs).map_err(text_of)
    }
}

/// Static pods start before services are listed, and without an API server.
fn services(objects: &dyn ObjectSource, request: &ContainerRequest<'_>) -> Option<Vec<Arc<berth_types::api::Service>>> {
    let known = objects.services(request.pod.namespace());
    if request.pod.is_static() { Some(known.unwrap_or_default()) } else { known }
}

fn read_of<T>(read: Result<Arc<T>, ObjectError>) -> ObjectRead<T> {
    match read {
        Ok(data) => ObjectRead::Found(data),
        Err(e @ ObjectError::NotFound { .. }) => ObjectRead::Absent(e.to_string()),
        Err(e) => ObjectRead::Failed(e.to_string()),
    }
}

async fn env_file(request: &ContainerRequest<'_>, volume: &str, path: &str) -> ReadFile {
    let found = request.volumes.by_name.get(volume).and_then(|v| v.host_path.clone());
    let Some(root) = found else { return ReadFile::NoVolume };
    let path = PathBuf::from(path);
    let read = blocking("env file", move || {
        // A container may have created a FIFO there: opening must not wait for its other end.
        let file = sub_path::open_inside(&root, &path, OFlags::RDONLY | OFlags::NONBLOCK).map_err(text_of)?;
        let mut text = String::new();
        std::fs::File::from(file).take(ENV_FILE_MAX).read_to_string(&mut text).map_err(text_of)?;
        Ok(text)
    });
    match read.await {
        Ok(text) => ReadFile::Text(text),
        Err(e) => ReadFile::Failed(e.0),
    }
}
