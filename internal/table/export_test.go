package table

// MostHoles is mostHoles, and MostSearched mostSearched.
var MostHoles, MostSearched = &mostHoles, &mostSearched

// BacklogList is backlogList.
var BacklogList = &backlogList
