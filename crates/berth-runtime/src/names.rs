//! Reservation of sandbox and container names; makes create requests idempotent.
//!
//! A name stays reserved until its object is removed. An identical request *joins* one that is in progress: both get
//! the same result. The object of an earlier identical request is returned again if it is still usable. Any other
//! request for the name is rejected. Implements spec 09 §9 (AC-09-E6).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use super::errors::{ErrorKind, RuntimeError, RuntimeResult};

/// Result of a create request: the object's id.
pub type Outcome = RuntimeResult<String>;
/// Receives the result of a request in progress; `None` until then.
pub type Flight = watch::Receiver<Option<Outcome>>;

/// All reserved names.
#[derive(Debug)]
pub struct Names<R>(Mutex<HashMap<String, Held<R>>>);

#[derive(Debug)]
struct Held<R> {
    id: String,
    /// The request that reserved the name.
    request: R,
    flight: Option<Flight>,
}

impl<R> Default for Names<R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// Result of a claim.
#[derive(Debug)]
pub enum Claim {
    /// The caller owns the name: it creates the object and publishes the result.
    Mine(watch::Sender<Option<Outcome>>),
    /// An identical request is in progress: the caller waits for its result.
    Join(Flight),
    /// Id of an existing object from an identical request; the caller returns it if it is still usable.
    Again(String),
}

impl<R: PartialEq> Names<R> {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Held<R>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims the name for an object `id` of this request.
    ///
    /// # Errors
    /// The name is reserved for a different request.
    pub fn claim(&self, name: &str, id: &str, request: R) -> RuntimeResult<Claim> {
        let mut all = self.all();
        match all.get(name) {
            None => {
                let (told, flight) = watch::channel(None);
                let held = Held { id: id.to_owned(), request, flight: Some(flight) };
                all.insert(name.to_owned(), held);
                Ok(Claim::Mine(told))
            }
            Some(held) if held.request == request => Ok(match &held.flight {
                Some(flight) => Claim::Join(flight.clone()),
                None => Claim::Again(held.id.clone()),
            }),
            Some(held) => Err(taken(name, &held.id)),
        }
    }

    /// Marks the creation as complete.
    pub fn settle(&self, name: &str) {
        if let Some(held) = self.all().get_mut(name) {
            held.flight = None;
        }
    }

    /// Reserves the name of an object that existed before the start.
    pub fn recall(&self, name: &str, id: &str, request: R) {
        self.all().insert(name.to_owned(), Held { id: id.to_owned(), request, flight: None });
    }

    /// Releases the name after the object was removed or its creation failed; no-op if another id owns the name.
    pub fn release(&self, name: &str, id: &str) {
        let mut all = self.all();
        if all.get(name).is_some_and(|held| held.id == id) {
            all.remove(name);
        }
    }
}

/// The error for a reserved name.
pub fn taken(name: &str, id: &str) -> RuntimeError {
    RuntimeError::new(ErrorKind::Taken, format!("name \"{name}\" is reserved for \"{id}\""))
}

/// Waits for the result of a request in progress.
///
/// # Errors
/// The error of that request, or that it was abandoned.
pub async fn join(mut flight: Flight) -> Outcome {
    match flight.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(RuntimeError::other("the request was given up"))),
        Err(_) => Err(RuntimeError::other("the request was given up")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn identical_requests_join_and_others_are_refused() {
        // AC-09-E6
        let names = Names::default();
        let Ok(Claim::Mine(told)) = names.claim("n", "id1", 1) else { panic!("free") };
        let Ok(Claim::Join(flight)) = names.claim("n", "id2", 1) else { panic!("under way") };
        let refused = names.claim("n", "id3", 2).expect_err("another request");
        assert_eq!(refused.text, "name \"n\" is reserved for \"id1\"");
        let _ = told.send(Some(Ok("id1".to_owned())));
        assert_eq!(join(flight).await, Ok("id1".to_owned()));
        names.settle("n");
        assert!(matches!(names.claim("n", "id4", 1), Ok(Claim::Again(id)) if id == "id1"));
        names.release("n", "id9");
        assert!(names.claim("n", "id5", 2).is_err(), "only who has it releases it");
        names.release("n", "id1");
        assert!(matches!(names.claim("n", "id5", 2), Ok(Claim::Mine(_))));
    }

    #[tokio::test]
    async fn who_joined_what_was_dropped_is_told() {
        let names = Names::default();
        let Ok(Claim::Mine(told)) = names.claim("n", "id1", 1) else { panic!("free") };
        let Ok(Claim::Join(flight)) = names.claim("n", "id2", 1) else { panic!("under way") };
        drop(told);
        assert!(join(flight).await.is_err());
    }
}
