//! `CreateContainer` of CRI: validates the request, plans the launch, writes records.
//!
//! Implements spec 09a §3.2.

use std::sync::Arc;

use crate::{
    actor::SandboxHandle,
    container::{Container, Phase},
    cri_conversions,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    ids,
    name_reservations::{self, Claim},
    ports::{ContainerPlanRequest, Image, PlannedContainer, TargetContainer},
    runtime::{Runtime, blocking, now_ns},
    sandbox::{Sandbox, container_name},
    store::{
        self,
        objects::{ContainerMeta, Spec, VERSION, pack},
    },
};
use berth_proto::cri;
use berth_sys::failpoint;

/// Creates a container; an identical request returns the same container until it is started.
///
/// # Errors
/// The request is invalid or a step fails; partial results are deleted.
pub async fn create(runtime: &Arc<Runtime>, request: cri::CreateContainerRequest) -> RuntimeResult<String> {
    let pod = runtime.pod(&request.pod_sandbox_id)?;
    let config = request.config.ok_or_else(|| RuntimeError::invalid("container config must include metadata"))?;
    let sandbox = pod.now();
    let name = container_name(&config, &sandbox.config)?;
    sandbox.ready()?;
    let (config, id) = (Arc::new(config), ids::new_id());
    let asked = (config.clone(), sandbox.id().to_owned());
    let result_sender = match runtime.container_names.claim(&name, &id, asked)? {
        Claim::Acquired(result_sender) => result_sender,
        Claim::InProgress(flight) => return name_reservations::join(flight).await,
        Claim::Existing(old) => {
            let now = pod.now();
            let is_fit = now.container(&old).is_ok_and(|c| c.phase == Phase::Created && !c.is_removing);
            return if is_fit { Ok(old) } else { Err(name_reservations::taken(&name, &old)) };
        }
    };
    let making = runtime.clone();
    runtime
        .detached(async move {
            let outcome = make(&making, &pod, &id, &name, config).await.map(|()| id.clone());
            match &outcome {
                Ok(_) => making.container_names.complete(&name),
                Err(_) => making.container_names.release(&name, &id),
            }
            result_sender.send_replace(Some(outcome.clone()));
            outcome
        })
        .await
}

async fn make(
    runtime: &Arc<Runtime>,
    pod: &SandboxHandle,
    id: &str,
    name: &str,
    config: Arc<cri::ContainerConfig>,
) -> RuntimeResult<()> {
    let sandbox = pod.now();
    let image = image_of(runtime, &config).await?;
    runtime.ports.images.pin(&image.id, id).await?;
    failpoint::reached("create.root");
    let made = plan_and_write(runtime, pod, &sandbox, (id, name), config, &image).await;
    if let Err(cause) = made {
        let (shell, gone) = (runtime.shell.clone(), id.to_owned());
        // The next startup deletes what remains: it has no record, or one that no sandbox lists.
        let _ = blocking("deleting incomplete container", move || delete(&shell.layout, &gone)).await;
        runtime.ports.images.release(&image.id, id).await;
        return Err(cause);
    }
    Ok(())
}

async fn image_of(runtime: &Arc<Runtime>, config: &cri::ContainerConfig) -> RuntimeResult<Arc<Image>> {
    let name = config.image.as_ref().map_or("", |image| image.image.as_str());
    let found = if name.is_empty() { None } else { runtime.ports.images.resolve(name).await? };
    found
        .ok_or_else(|| RuntimeError::new(ErrorKind::NotFound, format!("failed to resolve image \"{name}\": not found")))
}

async fn plan_and_write(
    runtime: &Arc<Runtime>,
    pod: &SandboxHandle,
    sandbox: &Sandbox,
    (id, name): (&str, &str),
    config: Arc<cri::ContainerConfig>,
    image: &Image,
) -> RuntimeResult<()> {
    let stop_signal =
        cri_conversions::stop_signal(config.stop_signal, &image.stop_signal).map_err(RuntimeError::invalid)?;
    let parent = sandbox.config.linux.as_ref().map_or("", |linux| linux.cgroup_parent.as_str());
    let group = runtime.ports.groups.name(parent, id)?;
    let ask = ContainerPlanRequest {
        id: id.to_owned(),
        sandbox: sandbox.id().to_owned(),
        pod: sandbox.config.clone(),
        config: config.clone(),
        image: image.id.clone(),
        target: target(runtime, &config)?,
    };
    let (shell, own) = (runtime.shell.clone(), id.to_owned());
    blocking("creating container directory", move || make_directory(&shell.layout, &own)).await?;
    failpoint::reached("create.directory");
    let PlannedContainer { mut plan, user, devices, mounted } = runtime.ports.planner.container(ask).await?;
    failpoint::reached("create.planned");
    plan.longest_record = runtime.shell.config.longest_record();
    let meta = ContainerMeta {
        v: VERSION,
        id: id.to_owned(),
        sandbox_id: sandbox.id().to_owned(),
        name: name.to_owned(),
        created_ns: now_ns(),
        config: pack(&*config),
        image_id: image.id.clone(),
        image_digest: image.digests.first().unwrap_or(&image.id).clone(),
        image_name: image_name(image, &config),
        log_path: plan.log.clone(),
        stop_signal,
        user,
        group,
        mounted,
    };
    let container = Container {
        resources: config.linux.as_ref().and_then(|linux| linux.resources.clone()),
        meta: Arc::new(meta),
        config,
        phase: Phase::Created,
        is_updated: false,
        is_stop_signal_sent: false,
        is_killed: false,
        is_removing: false,
        early_exit: None,
        plan: Arc::new(plan),
        devices: Arc::new(devices),
    };
    let (layout, written) = (runtime.shell.layout.clone(), container.clone());
    blocking("writing container record", move || write(&layout, &written)).await?;
    runtime.note_container(id, sandbox.id());
    let added = pod.turn(move |sandbox| {
        sandbox.ready()?;
        sandbox.containers.insert(container.id().to_owned(), container);
        Ok(())
    });
    let added = added.await.and_then(|added| added);
    failpoint::reached("create.known");
    if added.is_err() {
        runtime.forget_container(id);
        let (pod, id) = (pod.clone(), id.to_owned());
        // The sandbox does not accept it: remove it from memory whether or not the record was written.
        let _ = pod.turn(move |sandbox| sandbox.containers.remove(&id)).await;
    }
    added
}

fn image_name(image: &Image, config: &cri::ContainerConfig) -> String {
    let asked = || config.image.as_ref().map(|image| image.image.clone()).unwrap_or_default();
    image.tags.first().cloned().unwrap_or_else(asked)
}

/// The container whose PID namespace this container joins.
fn target(runtime: &Runtime, config: &cri::ContainerConfig) -> RuntimeResult<Option<TargetContainer>> {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let Some(options) = context.and_then(|context| context.namespace_options.as_ref()) else { return Ok(None) };
    if options.pid() != cri::NamespaceMode::Target || options.target_id.is_empty() {
        return Ok(None);
    }
    let (pod, id) = runtime.container(&options.target_id)?;
    let other = pod.now();
    let container = other.container(&id)?;
    let pid = container.running().ok().map(|started| started.pid);
    Ok(Some(TargetContainer {
        id,
        sandbox: other.id().to_owned(),
        state: container.state().as_str_name().to_owned(),
        pid,
    }))
}

fn make_directory(layout: &store::Layout, id: &str) -> RuntimeResult<()> {
    store::make_directory(&layout.container(id), 0o700)
}

fn write(layout: &store::Layout, container: &Container) -> RuntimeResult<()> {
    let directory = layout.container(container.id());
    let spec = Spec { v: VERSION, plan: (*container.plan).clone(), devices: (*container.devices).clone() };
    store::save(&directory.join("spec.json"), &spec)?;
    failpoint::reached("create.spec");
    store::save(&directory.join("state.json"), &container.record())?;
    failpoint::reached("create.state");
    store::save(&directory.join("meta.json"), &*container.meta)?;
    failpoint::reached("create.meta");
    Ok(())
}

/// Deletes a container's directory; succeeds if there is none.
///
/// # Errors
/// The I/O error.
pub fn delete(layout: &store::Layout, id: &str) -> RuntimeResult<()> {
    store::delete(&layout.container(id))
}
